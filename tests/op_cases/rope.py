"""The contract of apply_rope."""

import torch
from op_cases.op import Case, tried
from torch import Tensor

from trainkit.kernels.contract import Draw


def rope_case(
    label: str,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    rotary_dim: int | None = None,
    batch: int = 2,
    seq_len: int = 9,
    layout: str = "positions first",
    shared_angles: bool = True,
    wide_angles: bool = False,
    scaling: float = 1.0,
    interleaved: bool = False,
    large: bool = False,
) -> Case:
    """A call on (batch, heads, seq_len, head_dim).

    Args:
        label: what is special about it.
        heads: query and key heads.
        head_dim: columns of a head.
        rotary_dim: columns that turn; all by default.
        batch: sequences.
        seq_len: positions.
        layout: memory order: "positions first" (from a projection), "heads first", "packed" (slices
            of one projection), "columns first" or "expanded" (one head's memory for all heads).
        shared_angles: one row of angles for all sequences, or each its own positions.
        wide_angles: cos and sin in fp32, as in the vision tower of qwen2_vl.
        scaling: factor inside cos and sin, as yarn has.
        interleaved: pairs of neighbours turn.
        large: GPU only.
    """
    turned = head_dim if rotary_dim is None else rotary_dim

    def projections(draw: Draw) -> tuple[Tensor, Tensor]:
        if layout == "packed":
            whole = draw.normal(batch, seq_len, sum(heads) + heads[1], head_dim)
            q, k, _ = whole.split([heads[0], heads[1], heads[1]], dim=2)
            return q.transpose(1, 2), k.transpose(1, 2)
        if layout == "expanded":
            q, k = (
                draw.normal(batch, 1, seq_len, head_dim).expand(-1, number, -1, -1)
                for number in heads
            )
            return q, k
        orders = {
            "positions first": ((batch, seq_len, -1, head_dim), (0, 2, 1, 3)),
            "heads first": ((batch, -1, seq_len, head_dim), (0, 1, 2, 3)),
            "columns first": ((batch, head_dim, -1, seq_len), (0, 2, 3, 1)),
        }
        shape, order = orders[layout]
        q, k = (
            draw.normal(*[number if size < 0 else size for size in shape]).permute(order)
            for number in heads
        )
        return q, k

    def inputs(draw: Draw) -> dict[str, Tensor]:
        q, k = projections(draw)
        rows = 1 if shared_angles else batch
        steps = torch.arange(seq_len, device=draw.device, dtype=torch.float32)
        starts = torch.arange(rows, device=draw.device).mul(37)[:, None]
        rates = 10000.0 ** -(torch.arange(turned // 2, device=draw.device) * 2 / turned)
        angles = (starts + steps)[..., None] * rates
        angles = torch.cat((angles, angles), dim=-1)
        dtype = draw.dtype
        if wide_angles:
            dtype = torch.promote_types(dtype, torch.float32)
        return {
            "q": q,
            "k": k,
            "cos": (angles.cos() * scaling).to(dtype),
            "sin": (angles.sin() * scaling).to(dtype),
        }

    return Case(label, inputs, ("q", "k"), {"interleaved": interleaved}, large)


APPLY_ROPE = tried(
    "apply_rope",
    cases=(
        rope_case("qwen2-0.5b", heads=(14, 2), head_dim=64),
        rope_case("llama", heads=(8, 2), head_dim=128, layout="heads first"),
        rope_case("packed positions", shared_angles=False),
        rope_case("packed projection", heads=(8, 4), head_dim=96, layout="packed"),
        rope_case("phi-4-mini, partial", heads=(6, 2), head_dim=128, rotary_dim=96),
        rope_case("glm, partial", head_dim=128, rotary_dim=64, interleaved=True),
        rope_case("interleaved", head_dim=32, interleaved=True),
        rope_case("gemma", heads=(8, 1), head_dim=256, seq_len=5),
        rope_case("vision", heads=(4, 4), head_dim=80, batch=1, wide_angles=True),
        rope_case("odd heads", heads=(7, 7), head_dim=10, rotary_dim=6),
        rope_case("one token", batch=1, seq_len=1),
        rope_case("one head", heads=(1, 1)),
        rope_case("no tokens", seq_len=0),
        rope_case("no sequences", batch=0),
        rope_case("columns first", layout="columns first"),
        rope_case("expanded", layout="expanded"),
        rope_case("scaled", scaling=1.3),
        rope_case("long", heads=(14, 2), seq_len=2048, large=True),
        rope_case("long, 7b", heads=(28, 4), head_dim=128, seq_len=1025, large=True),
        rope_case(
            "long, packed",
            heads=(32, 32),
            head_dim=96,
            seq_len=777,
            layout="packed",
            shared_angles=False,
            large=True,
        ),
        rope_case(
            "long, glm",
            heads=(32, 2),
            head_dim=128,
            rotary_dim=64,
            seq_len=1025,
            interleaved=True,
            large=True,
        ),
    ),
    tiny=rope_case("tiny", heads=(2, 1), head_dim=4, rotary_dim=2, batch=1, seq_len=2),
)
