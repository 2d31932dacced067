"""What goes to the hub: the model, and never the run directory around it.

transformers uploads all of ``output_dir``: here that is the command, the environment with the
changes of the working copy, the dropped rows of the data and the logs. A pickle of the arguments,
with the token in them, goes along. So whole checkpoints and ``final/`` are uploaded instead, from
the directories that hold nothing else.
"""

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from trainkit.errors import TrainkitError
from trainkit.train.prepare import settings_refused_by

logger = logging.getLogger(__name__)

OF_TRAINING = (
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "log_window_rank*",
    "stream_rank*",
    "global_step*",
    "sharded_state*",
    "latest",
    "zero_to_fp32.py",
    "manifest.json",
)
"""Files of a checkpoint that only continuing it needs."""


class Hub:
    """Uploads each checkpoint when it is complete, and the final model; rank 0 has it.

    ``is_dry`` asks the hub who we are, which needs network and login, and makes and sends nothing.
    """

    def __init__(self, args: TrainingArguments, *, is_dry: bool = False) -> None:
        self._args, self._is_dry = args, is_dry
        self._upload: Future[Any] | None = None
        self._uploading: Path | None = None
        self._client = HfApi()  # one for all uploads: it does them one after another
        self._model_id = str(args.hub_model_id)
        disable_progress_bars()
        # A hub out of reach or no login is said with the key.
        with settings_refused_by("the repository on the hub", "training.push_to_hub"):
            if is_dry:
                HfApi().whoami(token=args.hub_token)
            else:
                self._make_repository()

    def _make_repository(self) -> None:
        args = self._args
        name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
        made = HfApi().create_repo(
            name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True
        )
        self._model_id = made.repo_id

    @property
    def uploading(self) -> Path | None:
        """The checkpoint that is being uploaded; it must not be deleted."""
        return self._uploading if self._upload is not None and not self._upload.done() else None

    def push_checkpoint(self, checkpoint: Path, step: int) -> None:
        """Begin to upload a whole checkpoint, as ``hub_strategy`` says; nothing waits for it."""
        args = self._args
        if self._is_dry or args.hub_strategy == HubStrategy.END:
            return
        if self.uploading is not None and not args.hub_always_push:
            return
        self._report_failure()
        message = f"Training in progress, step {step}"
        self._uploading = checkpoint
        self._upload = self._begin(checkpoint, message)
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = args.hub_strategy == HubStrategy.CHECKPOINT
            folder = "last-checkpoint" if is_last else checkpoint.name
            # Uploads of one client queue up: when this one is done, so is the one before.
            self._upload = self._begin(checkpoint, f"{message}, checkpoint", folder)

    def push_final(self, final: Path) -> None:
        self._report_failure()
        error = self._begin(final, "End of training").exception()  # waits
        if error is not None:
            raise TrainkitError(
                f"the final model was not uploaded: {' '.join(str(error).split())}",
                where=str(final),
                fix=f"it is whole here: hf upload {self._model_id} {final}",
            ) from error

    def _begin(self, directory: Path, message: str, folder: str | None = None) -> "Future[Any]":
        """Upload the model in a directory, or all of it to ``place``."""
        return self._client.upload_folder(
            repo_id=self._model_id,
            folder_path=directory,
            path_in_repo=folder,
            commit_message=message,
            ignore_patterns=list(OF_TRAINING) if folder is None else None,
            token=self._args.hub_token,
            revision=self._args.hub_revision,
            run_as_future=True,
        )

    def _report_failure(self) -> None:
        if self._upload is not None and self._upload.done() and self._upload.exception():
            logger.warning("%s was not uploaded: %s", self._uploading, self._upload.exception())
            self._upload = None
