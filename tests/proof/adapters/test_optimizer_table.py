"""Every optimizer of torch, torchao and the site of optimizers: what torch.save keeps is kept, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.adapters.optimizer_table import DTYPES, is_worse, judge_all
from tests.adapters.optimizers import SITE, Entry, find_optimizers
from tests.sites import find as find_site

if TYPE_CHECKING:
    from pathlib import Path

#: What a resume of ours does not keep yet, though torch.save does (27 November 2026), by the first cause.
NOT_YET = {
    "LBFGS": """
        torch.optim.LBFGS
    """,
    "copies of objects on several ranks are said to differ": """
        apollo_torch.GaLoreAdafactor apollo_torch.GaLoreAdamW dadaptation.DAdaptAdaGrad
        dadaptation.DAdaptAdam dadaptation.DAdaptAdan galore_torch.GaLoreAdafactor
        galore_torch.GaLoreAdamW prodigyopt.Prodigy pytorch_optimizer.AdaShift
        pytorch_optimizer.Conda pytorch_optimizer.ScalableShampoo
    """,
    "the dry step makes other state than is stored": """
        bitsandbytes.optim.AdEMAMix bitsandbytes.optim.AdEMAMix8bit bitsandbytes.optim.Adagrad
        bitsandbytes.optim.Adagrad32bit bitsandbytes.optim.Adagrad8bit bitsandbytes.optim.Adam
        bitsandbytes.optim.Adam32bit bitsandbytes.optim.Adam8bit bitsandbytes.optim.AdamW
        bitsandbytes.optim.AdamW32bit bitsandbytes.optim.AdamW8bit bitsandbytes.optim.LAMB
        bitsandbytes.optim.LAMB32bit bitsandbytes.optim.LAMB8bit bitsandbytes.optim.LARS
        bitsandbytes.optim.LARS32bit bitsandbytes.optim.LARS8bit bitsandbytes.optim.Lion
        bitsandbytes.optim.Lion32bit bitsandbytes.optim.Lion8bit bitsandbytes.optim.PagedAdEMAMix
        bitsandbytes.optim.PagedAdEMAMix8bit bitsandbytes.optim.PagedAdam bitsandbytes.optim.PagedAdam32bit
        bitsandbytes.optim.PagedAdam8bit bitsandbytes.optim.PagedAdamW bitsandbytes.optim.PagedAdamW32bit
        bitsandbytes.optim.PagedAdamW8bit bitsandbytes.optim.PagedLion bitsandbytes.optim.PagedLion32bit
        bitsandbytes.optim.PagedLion8bit bitsandbytes.optim.RMSprop bitsandbytes.optim.RMSprop32bit
        bitsandbytes.optim.RMSprop8bit bitsandbytes.optim.SGD bitsandbytes.optim.SGD32bit
        bitsandbytes.optim.SGD8bit torch_optimizer.Lamb
    """,
    "only the steps after the resume differ": """
        torch_optimizer.RAdam
    """,
    "options that only the stored group has are dropped": """
        heavyball.ADOPT:fp32 heavyball.AdEMAMix:fp32 heavyball.AdamC:fp32 heavyball.AdamW:fp32
        heavyball.HyperBallAdamW:fp32 heavyball.LaProp:fp32 heavyball.LaPropOrtho:fp32
        heavyball.MSAMLaProp:fp32 heavyball.Muon:fp32 heavyball.MuonAdamW:fp32 heavyball.MuonLaProp:fp32
        heavyball.NAdam:fp32 heavyball.OrthoLaProp:fp32 heavyball.RMSprop:fp32 heavyball.SFAdamW:fp32
        heavyball.SGD:fp32 heavyball.SUDSAdamW:fp32 heavyball.Scion:fp32 heavyball.SignLaProp:fp32
        heavyball.UnscaledAdamW:fp32 optimi.Adam optimi.AdamW optimi.Adan optimi.RAdam optimi.Ranger
        optimi.StableAdamW pytorch_optimizer.DAdaptAdaGrad pytorch_optimizer.DAdaptAdam
        pytorch_optimizer.DAdaptAdan pytorch_optimizer.DAdaptLion pytorch_optimizer.Prodigy
    """,
    "other entries of state_dict() are dropped": """
        heavyball.HeavyKLSOAP heavyball.HeavyKLShampoo heavyball.HeavySOAP heavyball.HeavySOAPAdEMAMix
        heavyball.HeavySOAPNAdam heavyball.HeavySOLP heavyball.KLSOAP heavyball.KLShampoo heavyball.SOAP
        heavyball.SOAPAdEMAMix heavyball.SOAPNAdam heavyball.SOLP pytorch_optimizer.Ranger21
        pytorch_optimizer.StableSPAM
    """,
    "quantized state is dequantized": """
        torchao.optim.Adam4bit torchao.optim.Adam8bit torchao.optim.AdamFp8:bf16 torchao.optim.AdamW4bit
        torchao.optim.AdamW8bit torchao.optim.AdamWFp8:bf16
    """,
    "state below a key that is no parameter": """
        dog.DoG dog.LDoG ivon.IVON madgrad.MADGRAD madgrad.MirrorMADGRAD pytorch_optimizer.EmoFact
        pytorch_optimizer.EmoLynx pytorch_optimizer.EmoNavi pytorch_optimizer.MADGRAD pytorch_optimizer.SPAM
        pytorch_optimizer.TRAC
    """,
    "state is lost that a dry step does not make": """
        apollo_torch.APOLLOAdamW dadaptation.DAdaptSGD pytorch_optimizer.DAdaptSGD pytorch_optimizer.SPlus
        pytorch_optimizer.SaRA
    """,
    "state that was not there is made": """
        pytorch_optimizer.SOAP
    """,
    "a state_dict() without 'state'": """
        heavyball.SAMWrapper heavyball.SplitOpt pytorch_optimizer.Lookahead pytorch_optimizer.Magma
        pytorch_optimizer.SafeFP16Optimizer pytorch_optimizer.ScheduleFreeWrapper
    """,
    "state that is a DTensor with a Partial placement": """
        pytorch_optimizer.Nero pytorch_optimizer.SGDSaI
    """,
    "the dry step of a load fails": """
        heavyball.LATHER heavyball.PSGDKron heavyball.PSGDLRA heavyball.PSGDPRO heavyball.QSGD
        muon.SingleDeviceMuon muon.SingleDeviceMuonWithAuxAdam pytorch_optimizer.ASGD
        pytorch_optimizer.AdaHessian pytorch_optimizer.AdaLOMO pytorch_optimizer.AliG pytorch_optimizer.BSAM
        pytorch_optimizer.FriendlySAM pytorch_optimizer.GSAM pytorch_optimizer.Gravity pytorch_optimizer.LOMO
        pytorch_optimizer.LookSAM pytorch_optimizer.SAM
        pytorch_optimizer.SophiaH pytorch_optimizer.WSAM
        schedulefree.AdamWScheduleFree schedulefree.AdamWScheduleFreeClosure
        schedulefree.AdamWScheduleFreePaper schedulefree.AdamWScheduleFreeReference
        schedulefree.RAdamScheduleFree schedulefree.RAdamScheduleFreeClosure schedulefree.SGDScheduleFree
        schedulefree.SGDScheduleFreeClosure torch.optim.SparseAdam torch_optimizer.Adahessian
    """,
}

_site = find_site(SITE)
ENTRIES, LEFT_OUT = find_optimizers(str(_site) if _site else None)


def _list_rows() -> list[Any]:
    """Return each optimizer with each dtype; those of ``NOT_YET`` may fail."""
    reasons = {name: reason for reason, names in NOT_YET.items() for name in names.split()}
    return [
        pytest.param(
            entry,
            dtype,
            # not strict: what the load by stored state has mended is to be taken out once all layouts have run
            marks=[pytest.mark.xfail(reason=reason, strict=False)] if reason else [],
            id=f"{entry.name}-{dtype}",
        )
        for entry in ENTRIES
        for dtype in DTYPES
        for reason in [reasons.get(entry.name) or reasons.get(f"{entry.name}:{dtype}")]
    ]


@pytest.mark.parametrize(("entry", "dtype"), _list_rows())
def test_a_resume_keeps_what_torch_save_keeps(tmp_path: Path, entry: Entry, dtype: str) -> None:
    """State, options and the next steps are those of the job that was not interrupted, wherever torch.save's are."""
    worse = [*filter(None, map(is_worse, judge_all(entry, dtype, tmp_path)))]
    assert not worse, "\n".join(worse)


def test_each_optimizer_runs_or_says_why_not(tmp_path: Path) -> None:
    """What can be imported is judged in some case, or stands in ``SKIPPED`` with the reason."""
    if _site is None:
        pytest.skip("without the site only torch's and torchao's are judged")
    assert not [name for name, reason in LEFT_OUT.items() if reason.startswith("cannot be imported")]
    assert len(ENTRIES) > 300
