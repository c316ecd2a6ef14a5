"""Target of a command: a model, its device and number format, and the workspace."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from ...data.errors import UsageError
from ...data.workspace import DEFAULT_WORKSPACE, ModelWorkspace, Workspace
from ..flags import Flags, flag

if TYPE_CHECKING:
    from ...serving.cache.options import CacheOptions
    from ...serving.models.defaults import ModelDefaults
    from ...serving.models.served import ServedModel
    from ...serving.options import EngineOptions
    from ...training.cache.schedule import CacheSchedule
    from ..output import Output


@dataclass(frozen=True, slots=True)
class Target:
    """The model, its device and number format, and the folder through which commands share results."""

    PANEL: ClassVar = "Model and workspace"

    base: Annotated[
        str,
        flag(
            "--model -m",
            "Bundled model name, local diffusers folder, hub id, or checkpoint of a single file.",
            is_shared=True,
            metavar="NAME|DIR|ID|FILE",
        ),
    ] = "emoji-xl"
    revision: Annotated[
        str | None, flag("--revision", "Branch, tag or commit of a hub id, as in ID@REVISION.", metavar="NAME")
    ] = None
    config: Annotated[
        str | None,
        flag(
            "--model-config",
            "Single file: diffusers folder or hub id of its architecture. Default: detected from the file.",
            metavar="DIR|ID",
        ),
    ] = None
    device: Annotated[
        str, flag("--device", "auto, cpu, cuda or cuda:N; auto uses a GPU if there is one.", is_shared=True)
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        flag("--dtype", "Number format of the denoising model; auto depends on the device.", is_shared=True),
    ] = "auto"
    workspace: Annotated[
        Path,
        flag(
            "--workspace -w",
            "Folder of tables, predictors and runs that commands share.",
            is_shared=True,
            file_okay=False,
        ),
    ] = Path(DEFAULT_WORKSPACE)

    def __post_init__(self) -> None:
        if self.config is not None and not Path(self.base).expanduser().is_file():
            raise UsageError(
                f"--model-config {self.config} is of single files (.safetensors), and --model is {self.base}"
            )
        if self.revision is not None and ("/" not in self.base or Path(self.base.split("@")[0]).expanduser().exists()):
            raise UsageError(f"--revision {self.revision} is of hub ids (org/name), and --model is {self.base}")

    @property
    def model(self) -> str:
        """Name of the model with its configuration or revision, so that two revisions have separate tables."""
        return "@".join(filter(None, (self.base, self.config, self.revision)))

    @property
    def root(self) -> Workspace:
        return Workspace(self.workspace)

    def defaults(self) -> "ModelDefaults":
        """Return the model's own settings, without loading it. Raises UsageError: there is no such model."""
        from ...serving.models.loading import model_defaults

        return model_defaults(self.model)

    def with_cache_file(self, options: "CacheOptions") -> "CacheOptions":
        """Return the cache options with the file of workspace or model. Raises UsageError: no such device or model."""
        from ...serving.models.loading import resolve_model
        from ...serving.models.placement import resolve_device

        place = self.root.for_model(self.model, str(resolve_device(self.device)))
        return options.with_file_of(place.root / "predictors", resolve_model(self.model))

    def schedule(self) -> "CacheSchedule":
        """Return the cache's schedule of workspace or model. Raises UsageError: there is none."""
        from ...serving.cache.options import CacheOptions
        from ...training.cache.schedule import CacheSchedule

        file = self.with_cache_file(CacheOptions("schedule")).schedule
        assert file is not None
        return CacheSchedule.load(file)

    def load(self, out: "Output", options: "EngineOptions | None" = None) -> "tuple[ServedModel, ModelWorkspace]":
        """Load the model; return it with its part of the workspace.

        Raises what `load_model` raises, and typer.Exit once rank 0 has ended, if torchrun started this process as
        another rank.
        """
        with out.status(f"Loading {self.model} ..."):
            from ...serving.models.loading import load_model

            if options is not None and options.parallel.is_on:
                from ...serving.models.parts import follow_torchrun

                if (code := follow_torchrun(self.model, options.parallel)) is not None:
                    # A rank that torchrun has started runs no other part of the command.
                    raise typer.Exit(code)
            served = load_model(self.model, self.device, self.dtype, options, workspace=self.root)
        place = self.root.for_model(self.model, str(served.device))
        if (options is None or options.cache.file is None) and (file := served.options.cache.file):
            whose = "the workspace" if file.is_relative_to(place.root) else "the model, as it was shipped"
            what = "schedule" if served.schedule is not None else "predictor"
            out.note(f"The cache goes by the {what} of {whose}: {file}")
        if options is not None and options.model.quantize is not None:
            how = "weights are kept in int8"
            if options.model.quantize == "fp8":
                how = "projections and feed-forward layers multiply in fp8"
                how += "" if served.device.type == "cuda" else ", which a CPU emulates slowly"
            out.note(f"The denoising model's {how}: images are near the model's own, not equal to them.")
        if served.offload is not None:
            sizes = served.offload.to_json(served.pipe)
            here, without = (sizes[name] / 1e9 for name in ("weight_bytes", "weight_bytes_without_offload"))
            out.note(f"Weights on {served.device}: {here:.2f} GB, without --offload {without:.2f} GB.")
        if served.unbatched is not None:
            out.note(f"{served.unbatched}; each request takes its own scheduler's steps, in the passes that all share.")
        return served, place


WHERE = Flags.of(Target)
"""Its options, for commands that need not all of them."""
