"""State that leaves pass to each other and derive from weights."""

import torch
from torch import Tensor, nn

from patchedserve.serving.layout.packing import pack_rows
from patchedserve.serving.patched.context import PatchContext
from patchedserve.serving.patched.leaves import PatchedGroupNorm
from patchedserve.serving.patched.tokens import to_patches

from ...support.patched_models import Alternation

CPU = torch.device("cpu")


def context_of(sizes: list[tuple[int, int]]) -> PatchContext:
    context = PatchContext(Alternation())
    context.begin(pack_rows(sizes, order="image", patch_size=None, num_levels=1, unit=1, device=CPU))
    return context


def test_work_of_a_norm_is_consumed_once() -> None:
    context = context_of([(4, 4)])
    assert not context.consume_fused("activation")
    context.record_fused("activation", "stitching")
    assert [context.consume_fused("activation") for _ in range(2)] == [True, False]
    assert [context.consume_fused("stitching") for _ in range(2)] == [True, False]
    # The next norm's record replaces one that was not consumed, and the next pass clears it.
    context.record_fused("activation", "stitching")
    context.record_fused("activation")
    assert not context.consume_fused("stitching")
    context.begin_pass()
    assert not context.consume_fused("activation")


def test_norm_follows_its_weights_to_another_dtype() -> None:
    """In bfloat16 on a CPU, a norm multiplies by float32 copies of its weights, which must follow the new weights."""
    generator = torch.Generator().manual_seed(0)
    norm = nn.GroupNorm(4, 16)
    norm.weight.data, norm.bias.data = (1 + torch.randn(16, generator=generator) for _ in range(2))
    context = context_of([(4, 4), (4, 8)])
    tokens = torch.randn(context.level.num_tokens, 16, generator=generator)

    def normed(leaf: PatchedGroupNorm) -> Tensor:
        context.begin_pass()
        with torch.inference_mode():
            return leaf(to_patches(tokens.bfloat16(), 1))

    leaf = PatchedGroupNorm(norm, context)
    before = normed(leaf)
    norm.to(torch.bfloat16)
    expected = normed(PatchedGroupNorm(norm, context))
    assert not torch.equal(before, expected), "rounding the weights must matter"
    assert torch.equal(normed(leaf), expected)
