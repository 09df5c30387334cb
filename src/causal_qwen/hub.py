"""A model directory → a repository of a hub, through huggingface_hub. This module knows no model class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_access", "check_directory", "push"]

LOGIN = "run `hf auth login`, or set HF_TOKEN"


def check_directory(directory: str | Path) -> Path:
    """The directory, if it holds a causal model.

    Raises:
        ValueError: If it does not.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path}: no config.json; give a directory that convert or train wrote") from None
    except ValueError:
        raise ValueError(f"{path}/config.json is not JSON; convert or train the model again") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not str(kind).startswith("causal_qwen"):
        raise ValueError(f"{path}: a model of type {kind!r}, not a causal one; convert it first")
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path}: no weights (*.safetensors)")
    return path


def check_access(repo: str, *, endpoint: str | None = None) -> None:
    """That a token is there and the hub knows it, before anything that takes long.

    Args:
        repo: "owner/name".
        endpoint: Of the hub; $HF_ENDPOINT, or the public one, by default.

    Raises:
        ValueError: If the name is none, there is no token, or the hub refuses it or does not answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo)
    if get_token() is None:
        raise ValueError(f"{repo}: there is no token to write with; {LOGIN}")
    api = HfApi(endpoint=endpoint)
    with _one_line(repo, api.endpoint):
        api.whoami()


def push(
    directory: str | Path,
    repo: str,
    *,
    private: bool | None = None,
    endpoint: str | None = None,
    message: str = "A CausalQwen model",
) -> str:
    """Upload a model directory as one commit; the repository is made if it is not there.

    Args:
        directory: As `convert` or `train` wrote it.
        repo: "owner/name".
        private: Whether a new repository is private; the owner's default when None.
        endpoint: As for `check_access`.
        message: Of the commit.

    Returns:
        Address of the repository.

    Raises:
        ValueError: If the directory holds no causal model, or the hub refuses or does not answer.
    """
    path = check_directory(directory)
    check_access(repo, endpoint=endpoint)
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    with _one_line(repo, api.endpoint):
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=path, commit_message=message)
    return str(address)


@contextmanager
def _one_line(repo: str, endpoint: str) -> Iterator[None]:
    """What the hub or the network says, as one line with a remedy.

    Raises:
        ValueError: Instead of what huggingface_hub raises.
    """
    from huggingface_hub.errors import (  # the first is its HTTP library's
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    remedies = {
        401: f"the token is missing or not valid; {LOGIN}",
        403: "the token may not write there; use one with write access, or another owner",
        404: "there is no such owner or repository; check the name, and whether the token may see it",
    }
    try:
        yield
    except OfflineModeIsEnabled:
        raise ValueError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = remedies.get(status, error.server_message or "the hub refuses; try again later")
        raise ValueError(f"{repo}: {endpoint} answers {status}: {reason}") from error
    except HTTPError as error:
        raise ValueError(f"{repo}: cannot reach {endpoint} ({error}); is there a network?") from error
    except RuntimeError as error:  # of a file that did not arrive
        cause = error.__cause__ or error
        raise ValueError(f"{repo}: the upload failed ({error} {cause}); run it again") from error
