"""A diffusers model that runs on packed batches of mixed resolutions, and shares the weights of the unmodified one."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from ...data.errors import UsageError
from ...data.tables.block_facts import WHOLE_MODEL
from ..cache.active import ActiveRows
from ..cache.forecast import forecast, with_previous
from ..cache.options import CacheOptions
from ..cache.patch_batch import CachedRequest
from ..cache.patch_cache import PatchCache
from ..cache.rules import Booleans, ReuseRule
from ..core.adapters import AdaptedLayers
from ..core.captured import PATIENCE, CapturedPasses, PassBatch, Pause, Recorder, run_now
from ..core.compiled import compile_blocks, running_blocks
from ..core.controls import NO_NETS, Nets
from ..core.denoiser import copy_modules, denoise, of_rows
from ..families import transformer_of
from ..families.table import entry_of, token_side
from ..layout.device_tables import Tables
from ..layout.packing import Level, Order, Packing, check_patch_size, pack_rows
from ..layout.patch_layout import References, every_size, patch_size_of
from .attention import PatchedCrossAttention, text_bias_of
from .cached_block import blocks_of, install
from .context import BatchLeaf, BatchValues, PatchContext, Strategy
from .leaves import PatchedConv
from .nets import PatchedNets
from .own_batch import OwnBatch
from .row_leaves import CachedCaption
from .strategy import StrategyTable
from .streams import CachedText
from .swap import PatchSwap
from .text import Shorten
from .tokens import to_tokens
from .unet_layers import unet_level


class PatchedModel:
    """Runs a model on packed batches. The given model is left unmodified; weights are shared.

    Convolutions of 3 x 3, norms and fused projections keep a copy of their weights in another layout, made at first
    use, so weights that are changed later need a new `PatchedModel`.

    It is called like the original, with patches in place of latents, and conditions and timesteps per row:
    `model(patches, timesteps, **conditions)`.

    Args:
        model: a U-Net or a transformer of a supported family.
        order: see `packing`.
        patch_size: side of a patch in latent pixels; None for the greatest common divisor of each batch.
        kernels: one of `kernels.launch.KERNELS`.
        nets: ControlNets that requests may name, left unmodified.
        strategy: strategy of every convolution; `auto` looks it up in `table`, which is empty until it is measured
            (`use_table`).

    Raises:
        UsageError: if the model has a module that is not known to work on parts of images.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        order: Order = "image",
        patch_size: int | None = None,
        kernels: str = "auto",
        strategy: Strategy | Literal["auto"] = "auto",
        nets: Nets = NO_NETS,
    ) -> None:
        self.adapters = AdaptedLayers.of(model)
        self.model: Any = copy_modules(model)
        self.table = StrategyTable()
        self._fixed_strategy: Strategy | None = None if strategy == "auto" else strategy
        self.context = PatchContext(self._choose, kernels)
        self.swap = PatchSwap(self.model, self.context)
        self.nets = PatchedNets(nets, self.context)
        leaves = list(self.model.modules())
        self._readers = [leaf for leaf in leaves if isinstance(leaf, PatchedCrossAttention)]
        self._with_values = [leaf for leaf in leaves if isinstance(leaf, BatchLeaf)]
        self._caption = next((leaf for leaf in leaves if isinstance(leaf, CachedCaption)), None)
        self._text = next((leaf for leaf in leaves if isinstance(leaf, CachedText)), None)
        self.order: Order = order
        self.patch_size = patch_size
        self.is_unet = isinstance(model, UNet2DConditionModel)
        self._transformer = transformer_of(model)
        self.num_levels = len(model.config["block_out_channels"]) if self.is_unet else 1  # type: ignore[index]
        config: Any = model.config
        self.unit = 1 if self.is_unet else token_side(entry_of(type(model).__name__), config)
        self.device: torch.device = self.model.device
        self.dtype: torch.dtype = self.model.dtype
        self.cache: PatchCache | None = None
        self.captured: CapturedPasses | None = None
        self._pass_batch = PassBatch()
        self._own: OwnBatch | None = None
        self._served_size = self.largest_served = 0
        self.is_compiled = False

    @property
    def shorten(self) -> Shorten:
        """The part of the text that may be left out of a batch, see `conditions_of`."""
        transformer = self._transformer
        if transformer is None or transformer.adds_mask or transformer.text_ids is not None:
            return None
        if transformer.mask is not None:
            return "padding"
        return "repeats" if transformer.joint_angles is None else None  # equal tokens at other places differ

    def use_graphs(self, recorder: Recorder, patience: int = PATIENCE) -> None:
        """Record and replay passes from now on (`CapturedPasses`), which a cache that decides for patches rules out."""
        assert self.cache is None or self.cache.is_whole, "what such a pass runs differs from step to step"
        self.captured = CapturedPasses(recorder, patience)

    def compile(self, *, backend: str | Callable[..., Any] = "inductor") -> int:
        """Compile the transformer blocks when they first run; return their number."""
        self.is_compiled = True
        return compile_blocks(self.model, backend=backend) + self.nets.compile(backend)

    def use_cache(self, options: CacheOptions, rule: ReuseRule) -> PatchCache:
        """Use the patch cache from now on, which decides in front of every block, or for all blocks as one.

        Raises:
            UsageError: if its patch size does not suit the model, or differs from that of `patch` order.
        """
        num_blocks = len(list(blocks_of(self.model)))
        cache = PatchCache(options, rule, unit=self.unit, num_levels=self.num_levels, num_blocks=num_blocks)
        if self.order == "patch":
            if self.patch_size not in (None, options.patch_size):
                raise UsageError(
                    f"patch size {self.patch_size} and cache patch size {options.patch_size} differ; "
                    "with --order patch they must be the same"
                )
            self.patch_size = options.patch_size
        if cache.is_whole:
            cache.add_block(WHOLE_MODEL, [])
        else:
            install(self.model, cache, self.context)
        self.cache = cache
        return cache

    @property
    def is_tuned(self) -> bool:
        """Whether `table` is used: transformers have no convolutions, and a fixed strategy leaves no choice."""
        return self.is_unet and self._fixed_strategy is None and not self.is_padded

    def _choose(self, conv: PatchedConv, level: Level, out_level: Level) -> Strategy:
        # Passes over padded batches serve images of other sizes, too.
        own = "stitch" if self.context.packing.bucket is not None else self._fixed_strategy
        return self.table.choose(conv, level, out_level) if own is None else own

    @property
    def is_padded(self) -> bool:
        """Whether batches are padded to buckets, because passes are recorded.

        They are not in image order, which has other tables at every level, and if convolutions regroup images.
        """
        return self.captured is not None and self.order == "patch" and self._fixed_strategy != "regroup"

    @property
    def always_packs(self) -> bool:
        """Whether batches of one resolution use this model, too, because of its cache or its recorded passes."""
        return self.cache is not None or self.captured is not None

    @property
    def channels_last_weights(self) -> dict[str, Tensor]:
        """Weights of the 3 x 3 convolutions in channels-last format, by module name."""
        return {name: conv.channels_last_weight() for name, conv in self.swap.convs.items() if not conv.is_pointwise}

    def check_size(self, size: tuple[int, int]) -> None:
        """Raise UsageError if latents of this size cannot be cut into patches of `patch` order."""
        if self.order == "patch":
            wanted = self.patch_size or patch_size_of([size])
            check_patch_size(wanted, [size], self.num_levels, self.unit)

    def use_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Cut and pad batches as if they had all of these latent sizes, so that fewer passes differ."""
        self._served_size = patch_size_of(sizes)
        self.largest_served = max(height * width for height, width in sizes)

    def pack(
        self,
        sizes: Sequence[tuple[int, int]],
        references: Sequence[References] = (),
        *,
        patch_size: int | None = None,
        is_padded: bool = False,
    ) -> Packing:
        """Return the packing of rows with these latent sizes and references, sorted by resolution. Raises what
        `pack_rows` raises.

        Args:
            sizes, references: as for `pack_rows`.
            patch_size: side of a patch; None for that of this model or, if it has none, of the sizes.
            is_padded: whether to pad it to its bucket, if this model does so.
        """
        patch_size = patch_size or self.patch_size
        if self.is_padded and patch_size is None:
            patch_size = self.common_patch_size([*sizes, *every_size(references)])
        return pack_rows(
            sizes,
            references,
            order=self.order,
            patch_size=patch_size,
            num_levels=self.num_levels,
            unit=self.unit,
            device=self.device,
            kernels=self.context.kernels,
            is_padded=is_padded and self.is_padded,
            largest=self.largest_served,
        )

    def common_patch_size(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the largest side of a patch for these latent sizes and the served ones."""
        return math.gcd(patch_size_of(sizes), self._served_size)

    def pad_conditions(self, conditions: dict[str, Any], packing: Packing) -> dict[str, Any]:
        """Add conditions of the dummy rows of a packing, if it has any."""
        return conditions if packing.bucket is None else of_rows(conditions, packing.value_rows)

    def use_table(self, table: StrategyTable) -> None:
        """Choose the strategy of each convolution from this table from now on."""
        self.table = table
        if self.captured is not None:
            self.captured.clear()  # recorded passes use the choices of the old table

    @cached_property
    def convolutions(self) -> list[tuple[PatchedConv, int]]:
        """Convolutions of 3 x 3 that differ in shape or level, each with the level of its input, in U-Net order."""
        found: dict[tuple[int, ...], tuple[PatchedConv, int]] = {}
        for name, conv in self.swap.convs.items():
            if conv.is_pointwise:
                continue
            level = unet_level(name, self.num_levels)
            shape = (conv.conv.in_channels, conv.out_channels, conv.stride, level)
            # A convolution that follows a norm represents its shape, because most do.
            if shape not in found or (conv in self.swap.norms and found[shape][0] not in self.swap.norms):
                found[shape] = (conv, level)
        return list(found.values())

    def begin(self, packing: Packing, *, repeats: int = 1, requests: Sequence[CachedRequest] = ()) -> None:
        """Begin a batch: set the rows of the next calls, and discard what was kept from call to call.

        Args:
            packing: result of `pack`.
            repeats: number of times that the last text token of every row counts (see `PatchedJointAttention`).
            requests: the owners of the rows, in order, for the patch cache, which is not used without them.
        """
        self.context.begin(packing, repeats=repeats)
        if self.cache is not None:
            self.cache.begin(packing, requests)
        self._pass_batch, self._own = PassBatch(), None

    def __call__(
        self, patches: Tensor, timesteps: Tensor, *, steps_done: Sequence[int] = (), **conditions: Any
    ) -> Tensor:
        """Predict for patches [P, channels, side, side] of the rows given to `begin`, each at its own timestep.

        Args:
            patches: in the model's dtype.
            timesteps: (rows,).
            steps_done: number of steps done by every request given to `begin`, for the patch cache if there is one.
            conditions: tensors with one entry per row, named as the model's own forward names them.

        Rows include the dummies of a padded packing, whose predictions have no meaning.
        """
        if self.cache is not None and self.cache.is_used:
            self.cache.begin_step(steps_done)
            if self.cache.is_whole:
                return self._step_of_some(self.cache, patches, timesteps, conditions)
        return self._predict(self._pass_batch, patches, timesteps, conditions)

    def _predict(self, batch: PassBatch, patches: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
        """Run one pass over all rows of the context's batch, or replay it."""
        if self.captured is None:
            return self.forward(patches, timesteps, conditions, self.context.batch_values)
        context, packing = self.context, self.context.packing
        if not batch.is_complete:
            # So that the first pass may be replayed, too.
            self.compute_values(conditions)
            batch.is_complete = True
        inputs: dict[str, Any] = {"patches": patches, "timesteps": timesteps, "conditions": conditions}
        is_padded = packing.bucket is not None
        # Compiled blocks are cut in two where a recording pauses, so that no other graphs are compiled within it.
        eager_pause = run_now if self.is_compiled else None
        if is_padded:
            inputs["tables"] = packing.tables
        return self.captured.run(
            batch,
            (packing.bucket or (packing.sizes, packing.references), context.batch_values.key),
            context.batch_values,
            lambda inputs, values, pause: self.forward(
                **inputs, batch_values=values, pause=pause or eager_pause if is_padded else None
            ),
            inputs,
            kept_alive=None if is_padded else packing,
        )

    def compute_values(self, conditions: dict[str, Any]) -> None:
        """Compute the values of the context's batch that its passes read, unless they are known."""
        self._compute_text(conditions)
        for leaf in self._with_values:
            leaf.fill(conditions["encoder_hidden_states"])

    @property
    def reused(self) -> Booleans | None:
        """(requests,) which of those given to `begin` the last call skipped as a whole; None if this never happens."""
        return self.cache.has_reused if self.cache is not None and self.cache.is_used and self.cache.is_whole else None

    @property
    def reusing_requests(self) -> Sequence[int]:
        """Indices, among the requests given to `begin`, of those for which the last call has reused anything."""
        return () if self.cache is None or not self.cache.is_used else self.cache.has_reused.nonzero()[0].tolist()

    def forward(
        self,
        patches: Tensor,
        timesteps: Tensor,
        conditions: dict[str, Any],
        batch_values: BatchValues,
        *,
        tables: Tables | None = None,
        pause: Pause | None = None,
    ) -> Tensor:
        """Run one pass in the state of the context, without starting a step of the patch cache.

        The arguments and the result are those of a call.

        Args:
            patches, timesteps, conditions: see above.
            batch_values: values of the batch; the pass computes what is missing.
            tables: tables of the packing, if the pass reads them from other memory.
            pause: interrupts the recording of this pass.
        """
        context = self.context
        context.begin_pass(timesteps, pause)
        with context.reading(batch_values, tables), self.adapters.on(batch_values.adapters):
            return self._denoise(patches, timesteps, self._read_text(conditions, batch_values))

    def _denoise(self, patches: Tensor, timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
        # A U-Net repeats one timestep for every patch; `RowTimesteps` puts those of the rows in its place.
        timestep, call = timesteps[0] if self.is_unet else timesteps, denoise
        if self._transformer is not None and self._transformer.call_packed is not None:
            call = self._transformer.call_packed
        with running_blocks(is_compiled=self.is_compiled, is_adapted=self.adapters.rows is not None):
            conditions = self.nets.with_residuals(patches, timesteps, conditions)
            return call(self.model, patches, timestep, conditions)

    def _step_of_some(
        self, cache: PatchCache, patches: Tensor, timesteps: Tensor, conditions: dict[str, Any]
    ) -> Tensor:
        """Predict in float32: with the model for the requests that the cache selects, by forecast for the others.

        The cache compares the inputs of the first block.
        """
        context, store = self.context, cache.stores[0]
        context.begin_pass(timesteps)
        inputs = (self._first_tokens(patches),)
        decision = cache.decide(0, inputs)
        active = decision.active
        if decision.kind != "skipped":
            assert active is None or isinstance(active, ActiveRows), "requests are computed whole"
            output = self._predict_some(patches, timesteps, conditions, active)
            outputs = with_previous(store, self.to_tokens(output.float()), active)
            cache.store_outputs(0, inputs, outputs, (), active)
            if active is None:
                return output.float()
        return self.from_tokens(forecast(store), patches.shape)

    def _predict_some(
        self, patches: Tensor, timesteps: Tensor, conditions: dict[str, Any], active: ActiveRows | None
    ) -> Tensor:
        """Predict for some rows, None for all, in a pass over a batch of their own: [their patches, ...]."""
        if active is None and not self.is_padded:
            return self._predict(self._pass_batch, patches, timesteps, conditions)
        context, packing = self.context, self.context.packing
        numbers = tuple(range(packing.num_rows) if active is None else active.numbers)
        if self._own is None or self._own.numbers != numbers:
            self._compute_text(conditions)
            self._own = OwnBatch.of(numbers, packing, conditions, context.batch_values, is_padded=self.is_padded)
        own = self._own
        with context.switch_batch(own.packing, own.values):
            given = patches.index_select(0, own.patches), timesteps.index_select(0, own.rows)
            found = self._predict(own.passes, *given, own.conditions)
        return found[: own.packing.starts[-1]]

    def _first_tokens(self, patches: Tensor) -> Tensor:
        """Return the input of the first block for these patches: [tokens, channels]."""
        if self._transformer is None:
            return to_tokens(self.model.conv_in(patches))
        embed = self._transformer.embed
        return (self.model.pos_embed(patches) if embed is None else embed(self.model, patches)).flatten(0, 1)

    def to_tokens(self, patches: Tensor) -> Tensor:
        """Patches of latents -> [tokens of the finest level, values of a token]."""
        count, channels, side, unit = patches.shape[0], patches.shape[1], patches.shape[2], self.unit
        cut = patches.reshape(count, channels, side // unit, unit, side // unit, unit)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * unit**2)

    def from_tokens(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `to_tokens`."""
        (count, channels, side, _), unit = shape, self.unit
        cut = tokens.view(count, side // unit, side // unit, channels, unit, unit)
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(shape)

    def _compute_text(self, conditions: dict[str, Any]) -> None:
        """Compute the values of the text of the context's batch, unless they are known."""
        values = self.context.batch_values
        with self.adapters.on(values.adapters):
            self._read_text(conditions, values)

    def _read_text(self, conditions: dict[str, Any], values: BatchValues) -> dict[str, Any]:
        """Pass the text to the attention leaves; it is computed in the first pass of a batch.

        Returns the conditions for the model, without the mask, which the leaves hold.
        """
        text, transformer, context = conditions["encoder_hidden_states"], self._transformer, self.context
        if self._readers and not values.keys_values:
            read = text if self._caption is None else self._caption.projection(text)
            values.keys_values = tuple(leaf.read(read) for leaf in self._readers)
        for leaf, keys_values in zip(self._readers, values.keys_values, strict=True):
            leaf.text = keys_values
        if transformer is None:
            return conditions
        mask = None if transformer.mask is None else conditions[transformer.mask]
        if values.text_bias is None:
            values.text_mask = mask
            values.text_bias = text_bias_of(text, values.repeats, mask, adds_mask=transformer.adds_mask)
        if self._text is not None:
            if values.text is None:
                values.text = self._text.embed(text, mask)
            conditions = conditions | {"encoder_hidden_states": text[:, :0]}
        context.text_bias = values.text_bias
        context.biased_text = mask if transformer.adds_mask else None
        return {name: value for name, value in conditions.items() if name != transformer.mask}
