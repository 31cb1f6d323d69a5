"""Explain an object store's error: its cause, the remedy, whether another attempt can help; nothing secret in it.

Causes are recognised by the attributes of errors, whatever the client: S3's code of an error, the HTTP status, the name
of the class. No client is imported for that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import list_causes

if TYPE_CHECKING:
    from collections.abc import Iterator

#: An error as S3 and Azure answer it; with code and message it may repeat the signed request, session token included.
_BODY = re.compile(r"(?:<\?xml[^>]*>\s*)?<Error\b.*?(?:</Error>|\Z)", re.DOTALL)
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_BOTO_CODE = re.compile(r"An error occurred \((\w+)\)")
#: obstore's text of an answer, after :func:`mask_secrets`.
_MASKED_CODE = re.compile(r"status code: \d{3}\b[^:<]*: (\w+)")
_STATUS = re.compile(r"status code: (\d{3})\b")
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):[^/@]*@")
#: Parts of URLs and headers by which requests are signed.
_SIGNED = re.compile(
    r"(?i)\b(X-Amz-(?:Signature|Credential|Security-Token)|X-Goog-(?:Signature|Credential)|AWSAccessKeyId|Signature|sig"
    r"|Authorization)([=:]\s*)(?:(?:Bearer|Basic|SharedKey)\s+)?[^\s&\"'<>]+"
)


class StoreProblem(NamedTuple):
    """A cause of errors of stores.

    Attributes:
        advice: The meaning, and what to do.
        is_permanent: Whether another attempt would meet it again.
        codes: Codes of stores and names of classes, by which it is recognised.
        texts: Parts of messages, by which it is recognised where there is no code.
        statuses: HTTP statuses, by which it is recognised where there is neither.
    """

    advice: str
    is_permanent: bool
    codes: frozenset[str]
    texts: tuple[str, ...] = ()
    statuses: frozenset[int] = frozenset()


#: The first that fits is taken; statuses count only after all codes and texts, since many codes share one.
_PROBLEMS = (
    StoreProblem(
        "the clock of this machine differs from the store's by too much: set it (`timedatectl set-ntp true`, or "
        "`chronyc makestep`), and run the job again",
        is_permanent=True,
        codes=frozenset({"RequestTimeTooSkewed"}),
    ),
    StoreProblem(
        "the store does not know the access key, or the secret does not match it: check where the client looks for "
        "them (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile or role), and that they belong to "
        "AWS_ENDPOINT_URL",
        is_permanent=True,
        codes=frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AuthenticationFailed"}),
    ),
    StoreProblem(
        "the session's credentials have ended: get new ones (`aws sso login`, or a new AWS_SESSION_TOKEN)",
        is_permanent=False,  # a client may fetch new ones by itself
        codes=frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}),
    ),
    StoreProblem(
        "the client has found no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a "
        "role",
        is_permanent=True,
        codes=frozenset({"NoCredentialsError", "PartialCredentialsError"}),
        texts=("/latest/api/token", "/latest/meta-data/iam"),
    ),
    StoreProblem(
        "the bucket does not exist at this endpoint: correct the URL or AWS_ENDPOINT_URL, or create the bucket; "
        "shardckpt creates none",
        is_permanent=True,
        codes=frozenset({"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}),
    ),
    StoreProblem(
        "the bucket is in another region: set AWS_REGION (for fsspec AWS_DEFAULT_REGION) to the bucket's",
        is_permanent=True,
        codes=frozenset(
            {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "NoRegionError"}
        ),
        texts=("incorrectly configured region",),
    ),
    StoreProblem(
        "the store takes fewer requests than it was sent: lower SHARDCKPT_REMOTE_THREADS and SHARDCKPT_REMOTE_PARTS, "
        "raise SHARDCKPT_REMOTE_ATTEMPTS, or ask for a higher limit",
        is_permanent=False,
        codes=frozenset(
            {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "ServerBusy"}
        ),
        statuses=frozenset({429}),
    ),
    StoreProblem(
        "the store answers a range of an object as if it were all of it (200, not 206 Partial Content), so that its "
        "bytes cannot be told apart; use fsspec for it: install s3fs, set SHARDCKPT_DISABLED_PLUGINS=obstore and "
        "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required",
        is_permanent=True,
        codes=frozenset(),
        texts=("non-partial response when range requested",),
    ),
    StoreProblem(
        "the checksum that the store sent is not that of the bytes: they are damaged, or the store sends an object's "
        "checksum with a range of it; for such a store set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required, and only "
        "the checkpoint's own digests are checked",
        is_permanent=False,
        codes=frozenset({"FlexibleChecksumError"}),
    ),
    StoreProblem(
        "no store answers there: check the host and the port in AWS_ENDPOINT_URL, its name's DNS, and whether this "
        "machine reaches it (`curl -I` of the endpoint)",
        is_permanent=False,
        codes=frozenset(
            {"EndpointConnectionError", "ClientConnectorError", "ClientConnectorDNSError", "ConnectionRefusedError"}
        ),
        texts=("HTTP error: error sending request", "Connection refused"),
    ),
    StoreProblem(
        "the store did not answer in time: raise SHARDCKPT_REMOTE_TIMEOUT (seconds, for obstore), or lower "
        "SHARDCKPT_REMOTE_PARTS",
        is_permanent=False,
        codes=frozenset({"ReadTimeoutError", "ConnectTimeoutError", "TimeoutError", "FSTimeoutError"}),
        texts=("operation timed out",),
    ),
    StoreProblem(
        "the key is known, but may not do this: a save needs the rights to list, read, write and delete objects and to "
        "abort multipart uploads (s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject, "
        "s3:AbortMultipartUpload); a load needs the first two",
        is_permanent=True,
        codes=frozenset({"AccessDenied", "AllAccessDisabled", "AuthorizationPermissionMismatch", "Forbidden"}),
        statuses=frozenset({401, 403}),
    ),
)


def find_problem(error: BaseException) -> StoreProblem | None:
    """Return the known cause of a store's error; None for any other error.

    Args:
        error: The client's error. The errors that it came from are examined, too.
    """
    errors = list(list_causes(error, with_context=True))
    codes = {code for exc in errors for code in _list_codes(exc)}
    texts = [str(exc) for exc in errors]
    for problem in _PROBLEMS:
        if problem.codes & codes or any(part in text for part in problem.texts for text in texts):
            return problem
    statuses = {int(status) for text in texts for status in _STATUS.findall(text)}
    return next((problem for problem in _PROBLEMS if problem.statuses & statuses), None)


def mask_secrets(text: str) -> str:
    """Return a URL or a message as logs and errors may show it.

    Passwords and signatures in URLs become ``***``. Of the body of a store's answer only code and message stay: others
    of its parts repeat the request, with the session's token in it.
    """
    return _SIGNED.sub(r"\1\2***", mask_password(_BODY.sub(_shorten_body, text)))


def mask_password(url: str) -> str:
    """Return the URL as logs and errors may show it: ``ftp://user:password@host`` without the password."""
    return _PASSWORD.sub(r"\1:***@", url)


def _shorten_body(body: re.Match[str]) -> str:
    found = (pattern.search(body[0]) for pattern in (_CODE, _MESSAGE))
    return ": ".join(match[1].strip() for match in found if match) or "(an answer without a code)"


def _list_codes(error: BaseException) -> Iterator[str]:
    yield type(error).__name__
    text = str(error)
    yield from _CODE.findall(text)
    yield from _MASKED_CODE.findall(text)
    yield from _BOTO_CODE.findall(text)
    response = getattr(error, "response", None)  # of botocore
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code"))
    yield str(getattr(error, "error_code", ""))  # of Azure's client
