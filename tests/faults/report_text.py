"""The sentences of the report."""

from __future__ import annotations

INTRODUCTION = """\
made this page, and makes it again. A run of some sets (`--only`) leaves the rows of the others; of more calls than
`--points`, so many are taken, those that change the disk first; without it all are. Each row has the day and the
revision of its run. `dcp` is plain `torch.distributed.checkpoint.save` of torch, `torch.save` is one file: the same
values, faults and oracle, by the one call that their documents show. What is *bad* of ours: lost, silent, mixed,
other, hang, late, not named, wrong checkpoint, crash, slow, memory, grown, drifted, survived, and whatever is not a
*pass* of the referee. *missed* faults did not come at their call,
and are not counted as points.

**The weakest promise** is that of object stores: faults come between the client and moto, an emulator, and no real S3,
GCS or Azure was killed, throttled or cut off. Then power cuts: they are replays of traces, in which what was not
fsynced is dropped, kept or torn; no machine was switched off, and no disk that lies about its cache was tried. Then
files without digests, as other libraries write them: damage of their values is found by a CRC-32 where they have one,
else by nobody.
"""

EXPLANATIONS = {
    "kills": """\
SIGKILL at a file system call of the operation, each at another, in a fork that strace is attached to. *thread* and
*process* save behind the training; the process is a fork, not a new interpreter, and is killed alone: it commits
nothing, so that the old must be there. In *training* it is the training of such a process that is killed, which plans
and commits. A *rank* is killed alone, too: who is left gets an error, and ends. *local checkpoints*: a rank of 2 is
killed before each change of its node's disk, or the one rank that there is. *URL*: both ranks are killed at each
upload, to a store of files; on S3: [stores](#stores). *manager*: it saves a step, and the oldest of three goes, as its
retention has it; all that are there must be whole. *pointer* and *links* are the same, read by the file or link
`latest`. *pin*, *unpin* and *mark* change what is noted of a step, *contiguous* are whole tensors. An operation must be
possible again afterwards, and a save must succeed and leave nothing of what was killed, else the outcome is *other*.
(ep, 1) writes the files of (torch_dist, 1), and has fewer rows; the zarr
and torch_checkpointing formats are only read. Whole trainings that are killed: [use](#use), [chaos](#chaos),
`tests/ci/faults/test_manager_kill.py`.

- **old**: what was there before, bit for bit; after a first save, nothing. **new**: what was saved, bit for bit.
- **lost**: neither is there, and a load says so. **silent**: the save succeeded, and what it saved is not there; or
  an `fsync` failed, and the save succeeded. **mixed**: a load succeeds with values of neither, or of both.
- **missed**: the fault did not come at its call, as the calls' numbers differed in that run; it proves nothing.
""",
    "io": """\
One call of the save or operation fails (EIO, ENOSPC, EDQUOT, EROFS, EINTR), or a write says that it wrote all, half or
none of its bytes, and wrote nothing. **damage found**: the write lied, and the load was refused, which is the best
there is. A manager and local checkpoints may say in a warning what is saved and not complete. Operations are those of
[kills](#kills): each must succeed when it is repeated, else *other*. A *rank* has the fault alone, and all ranks must
raise the same; *copies of local checkpoints* are those that 2 ranks have of each other's parts.
""",
    "disks": """\
A tmpfs of as many pages or inodes as a save needs, and of each smaller number down to what was there before, or of
`--points` of them; the forecast of space, which refuses such a save at its beginning, is off. **old**: an error, and
what was there before; ours must have the system's reason. The next save, when there is room again, must succeed, and
leave nothing beside itself, else *other*.
""",
    "power": """\
A disk model keeps what was fsynced, and drops, keeps or tears what was not, after each call. What is not there when
the save had returned is **silent**. `torch.save` and the directories of `dcp` are not fsynced. Operations are those of
[kills](#kills) but for *prune* and *unpin*: what these remove may come back.
""",
    "damage": """\
A checkpoint of two ranks, of which one thing is damaged at a time. *headers*: a bit of every byte of the manifests,
every bit of the index and of safetensors' headers, and 1,000 bits of a torch_dist data file that are no tensor's.
*payload*: a bit of a tensor, which the error must name with its file. *files*: cut in five ways, longer, gone, zeros,
swapped, of another step; every value of the manifests edited, each alone.

- **by verify**: the load gives the right values without the damaged bytes, and verify finds it. **by load**: nobody
  but a load can find it (the others have no verify).
- **silent**: a load succeeds with wrong values. **missed**: the values are right, and verify finds nothing.
- **not named**: the error does not name the file, or not the tensor.
""",
    "ranks": """\
A rank of a group of 2 to 4 exits, is killed or is stopped (SIGSTOP) where a step of a save or load begins; the steps
are those that events tell of. **named**: all others have raised the same error, which names the rank, within the
group's timeout of 3 s and 2 s more (**late**: after that), and the checkpoint is the old or the new one. A rank that
*raises* in each step is not in this table: `tests/faults/test_rank_errors.py`. *a call takes 6 s*: strace holds a call
of one rank's disk, each at another, longer than the timeout; one that takes 1 s is no fault, and all ranks have
**saved**.
""",
    "hostile": """\
Files of a checkpoint with bytes changed, cut, repeated, inserted and taken from other files; every other time without
digests, else with digests that were made right. A load, four queries and verify open each; of other libraries, whose
files have no digests, a read of all values, and the verbs verify, ls and inspect. **loaded**: it was still a
checkpoint; without digests nobody can know which values it had. **other**: an error that is not of the family, or
anything that a load has no business to do, such as an import or a file that is written. **slow**: more than 5 s, or
no end; **memory**: more than 200 MiB; **crash**: the process died.
""",
    "stores": """\
A save of 2 ranks to S3 (moto's server behind a proxy), with a fault at each of its requests, each at another; with
`kill`, both ranks are killed there. **new**: it loads; **old**: the save failed on all ranks, or was killed, and
nothing loads, or, of an *overwrite*, all of what was there before; a save over it must succeed. **silent**: the
overwrite succeeded, and the old save loads.
""",
    "use": """\
*saves of one process*: in the foreground, by a thread, by a process, over one path, each loaded again; **grown**:
descriptors, threads or shared memory are more than after the first 60, or memory by more than 32 MiB. *kills*: jobs
of 2 ranks save over one path and are killed at random moments, all at once or one first; **old** is the last save
that had returned, **new** the one that was under way. **reads**: loads of a reader beside it, each whole and none
older than the one before, else *other*. `python -m tests.faults.soak` is the program; *30 minutes of kills* ends with
1,000 saves of one process.
""",
    "chaos": """\
[ckpt-chaos](https://pypi.org/project/ckpt-chaos/), a third party's referee, kills a training at each file event of a
save that it knows, on each rank, resumes it, and compares its last weights with those of one that was not killed. Ours
are a plain training loop with the CheckpointManager, and the referee's own Trainer and Lightning programs with our
callback and plugin; *Hugging Face Trainer*, *Lightning* and *plain DCP* are those programs as the referee has them.
**pass**: resumed at the newest whole step, to equal weights. **lost work**: at an older one. **hard fail**: not
resumed. **drifted**: something else was killed. Points by name: `tests/faults/chaos/scores.json`.
""",
    "mutations": """\
The source is broken in one way at a time, in a copy, and the test that is named is run there, and must fail; all of
them pass in the unchanged copy. `python -m tests.faults.mutations` is the program. Strategies that are wrong, and the
test of the contract that finds each, are in [another table](../../shardckpt/testing/README.md#what-it-catches).
""",
}
