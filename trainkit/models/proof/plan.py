"""The plan for a model: what each of its modules is, proved, and what takes its place.

Proofs run on the replica, so the plan holds for every module of the same class and settings, in
whatever form the model holds it; other modules stay plain. Last, one training step of the whole
replica is compared in fp64, plain and with everything swapped in; what fails it alone is taken out.
"""

import hashlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.auto_class import FAILURES
from trainkit.errors import PatchError
from trainkit.evaluation_mode import changed
from trainkit.kernels.launch import by_reference
from trainkit.models.loss import CausalLM, LossHead, head_at_work, why_no_loss_head
from trainkit.models.proof.compare import Finding, Wide, furthest, other_mode, relative
from trainkit.models.proof.delta import find_delta
from trainkit.models.proof.gates import find_experts, find_gate
from trainkit.models.proof.instances import recordable
from trainkit.models.proof.norms import LayerNorm, RMSNorm, find_gated_norm, find_norm
from trainkit.models.proof.replica import (
    Signature,
    code_signature,
    is_linear,
    make_replica,
    outermost,
    signature,
)
from trainkit.models.proof.rewritten import JoinedNorm, Rewritten, find_turn, turning_functions
from trainkit.models.proof.source import methods, names_in, redirected
from trainkit.models.swap import KernelForward, plain_class, subclass_of
from trainkit.models.vision import loss_of_a_small_image
from trainkit.options.data import IGNORE_INDEX
from trainkit.options.model import OPS

logger = logging.getLogger(__name__)

WHOLE = 1e-9
"""In fp64, loss and every gradient of the whole; the worst of 165 types is off by 2e-12."""

_TOKENS = (2, 12)
_FEW_TOKENS = (1, 4)
_plans: dict[object, "Plan"] = {}


@dataclass(frozen=True)
class Part:
    """What one op does to the modules of one signature."""

    finding: Finding
    kind: str
    label: str


@dataclass
class Plan:
    """Everything that was found in one model.

    Attributes:
        loss: what was found of the head; None in a model without one.
        whole_error: of loss and gradients of the whole replica, in fp64.
        dropped: label to reason, for what failed the whole step.
        missing: op to the reason why nothing of the model is what it is for.
    """

    model_type: str
    parts: dict[Signature, list[Part]] = field(default_factory=dict)
    loss: Finding | None = None
    whole_error: float | None = None
    dropped: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    calls: dict[Any, Any] = field(default_factory=dict)
    attention: str = "eager"
    seconds: float = 0.0

    def digest(self, without: Iterable[str] = ()) -> str:
        """The same for the same plan, on every rank and in every run."""
        lines = sorted(
            f"{kind} {part.label} {part.finding.verdict} {sorted(part.finding.settings.items())}"
            for kind, parts in self.parts.items()
            for part in parts
        )
        lines += [str(self.loss and self.loss.verdict), str(sorted(self.dropped)), *sorted(without)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def key_of(self, module: nn.Module) -> Signature:
        """Its place in ``parts``; what runs its own lines may differ in numbers."""
        key = code_signature(module)
        return key if key in self.parts else signature(module)

    def call_keys(self, module: nn.Module) -> tuple[Any, Any]:
        """Of ``calls``: for a module of just these weights' shapes, and for any of its kind."""
        key = self.key_of(module)
        return (key, tuple(each.shape for each in module.parameters())), key

    def findings(self, op: str) -> list[tuple[str, Finding]]:
        found = [
            (part.kind, part.finding)
            for parts in self.parts.values()
            for part in parts
            if part.finding.op == op
        ]
        if op == "linear_cross_entropy" and self.loss is not None:
            found.append(("head", self.loss))
        return found

    def swaps(
        self,
        model: nn.Module,
        ops: Iterable[str],
        signatures: Mapping[nn.Module, Signature] | None = None,
        without: Collection[nn.Module] = (),
    ) -> tuple[dict[nn.Module, type[nn.Module]], Counter[str], Counter[str]]:
        """Module to class, for the ops that are on; how many run each op; how many stay plain."""
        wanted, labels = set(ops), set(self.dropped)
        if "rope" in labels:
            labels.add("read together")
        swaps: dict[nn.Module, type[nn.Module]] = {}
        numbers: Counter[str] = Counter()
        others: Counter[str] = Counter()
        kinds: dict[type[nn.Module], set[str]] = {}
        for kind, parts in self.parts.items():
            on = {part.finding.op for part in parts if part.finding.verdict == "on"}
            kinds.setdefault(kind[0], set()).update(on)
        for module in model.modules():
            if plain_class(module) not in kinds:
                continue
            # A norm that an addition takes in is computed there, whatever is bound to it.
            joins = {op.removeprefix("add_") for op in wanted if op.startswith("add_")}
            if kinds[plain_class(module)] & (wanted | joins):
                _refuse_bound(module)
            key = self.key_of(module) if signatures is None else signatures[module]
            if key not in self.parts or module in without:
                others.update(kinds[plain_class(module)])
                continue
            parts = self.parts[key]
            merged: dict[type[KernelForward], dict[str, Any]] = {}
            for part in parts:
                finding = part.finding
                if finding.op in wanted and finding.forward and part.label not in labels:
                    merged.setdefault(finding.forward, {}).update(finding.settings)
            if merged:
                made = type(module)
                for forward, settings in merged.items():
                    made = subclass_of(made, forward, settings)
                swaps[module] = made
                numbers.update(_ops_of(parts, wanted, labels, made))
        causal_lm: Any = outermost(model)
        proved = self.loss is not None and self.loss.verdict == "on"
        if "linear_cross_entropy" in wanted and proved and not why_no_loss_head(causal_lm):
            head = head_at_work(causal_lm.get_output_embeddings())
            for module, forward in ((causal_lm, CausalLM), (head, LossHead)):
                _refuse_bound(module)
                swaps[module] = subclass_of(type(module), forward)
            numbers["linear_cross_entropy"] += 2
        return swaps, numbers, others


def _ops_of(
    parts: list[Part], wanted: set[str], dropped: set[str], made: type[Any]
) -> Iterator[str]:
    """The ops that a module now runs; a rewritten one says for itself."""
    for op in {part.finding.op for part in parts if part.label not in dropped} & wanted:
        if op.startswith("add_"):
            if made.joined:
                yield op
        elif any(p.finding.verdict == "on" and p.finding.op == op for p in parts):
            yield op


def _refuse_bound(module: nn.Module) -> None:
    if "forward" in vars(module):
        source = getattr(vars(module)["forward"], "__module__", None) or "an unknown module"
        raise PatchError(
            f"a {type(module).__name__} has its own `forward`, bound to the instance by {source}; "
            "a swapped class would never run",
            fix="patch before that library does, or do not use it together with the kernels "
            "(Liger binds forwards; so does accelerate's device_map over several devices)",
        )


def plan_for(model: nn.Module) -> Plan:
    """Find and prove, once for a configuration in a process."""
    causal_lm = outermost(model)
    if (given := vars(causal_lm).get(_GIVEN)) is not None:
        return cast("Plan", given)
    kinds = {plain_class(each) for each in causal_lm.modules()}
    key = (
        causal_lm.config.to_json_string(use_diff=False),
        frozenset((kind, kind.forward) for kind in kinds),
        signature(causal_lm)
        if len(kinds) < 3
        else frozenset(  # of all modules that have no other in them but linear layers
            signature(each)
            for each in causal_lm.modules()
            if not any(True for _ in each.children())
        ),
    )
    if key not in _plans:
        _plans[key] = _make_plan(causal_lm)
    return _plans[key]


_GIVEN = "_trainkit_plan"


def give_plan(model: nn.Module, plan: Plan) -> None:
    """Have `plan_for` give a plan for this model, which has no numbers to prove one on."""
    vars(outermost(model))[_GIVEN] = plan


def _make_plan(model: Any) -> Plan:
    start = time.perf_counter()
    plan = Plan(model.config.model_type)
    try:
        # What is proved is where an op goes and what it is given; that its kernel is right, the
        # self-check proves in the model's own dtype. In fp64 it would be compiled for this alone.
        with ExitStack() as quiet, by_reference(torch.float64):
            its_logger = logging.getLogger("transformers")
            quiet.callback(its_logger.setLevel, its_logger.level)
            its_logger.setLevel(logging.ERROR)  # it may warn of what was said of the model already
            replica: Any = make_replica(model, few_experts=True)
            plan.attention = replica.config._attn_implementation
            replica = replica.double().train().requires_grad_(True)
            device = next(replica.parameters()).device
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(1)
                _find(replica, plan)
                for call in _first_calls(replica.eval(), _FEW_TOKENS):
                    exact, key = plan.call_keys(call.module)
                    if key in plan.parts:
                        given = recordable(call.args, call.kwargs)
                        plan.calls = {exact: given, key: given} | plan.calls
                _settle(replica.train(), plan)
    except FAILURES as error:
        reported = (str(error).splitlines() or [""])[0][:160]
        reason = (
            f"a model of one layer of each kind fails by itself: {type(error).__name__}: {reported}"
        )
        plan = Plan(plan.model_type, missing=dict.fromkeys(OPS, reason))
    for op in OPS:
        if not plan.findings(op):
            plan.missing.setdefault(op, WHY_NOTHING[op])
    plan.seconds = time.perf_counter() - start
    return plan


WHY_NOTHING = {
    "rms_norm": "the model has no RMSNorm",
    "add_rms_norm": "no addition is followed by a norm",
    "layer_norm": "the model has no LayerNorm",
    "add_layer_norm": "no addition is followed by a LayerNorm",
    "gated_rms_norm": "the model has no RMSNorm with a gate",
    "rope": "no function turns its queries and keys by cosines and sines",
    "swiglu": "the model has no gated feed-forward block outside of experts",
    "experts": "the model has no experts with their weights in stacks",
    "gated_delta_rule": "no layer carries a state by a gated delta rule",
    "linear_cross_entropy": "the model has no output layer",
}


@dataclass
class _Seen:
    """The first call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def _batch(replica: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = replica.config.get_text_config().vocab_size
    ids = torch.randint(min(3, size - 1), size, shape, generator=generator)
    labels = ids.clone()
    labels[0, : shape[1] // 3] = IGNORE_INDEX
    device = next(replica.parameters()).device
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def _find(replica: Any, plan: Plan) -> None:
    """Everything but the whole step."""
    seen, turned = _record(replica)
    norms: dict[Signature, Finding] = {}
    for call in seen:
        key = signature(call.module)
        if key in plan.parts:
            continue
        found = _find_leaf(call)
        if found is not None:
            if found.forward in (RMSNorm, LayerNorm):
                norms[key] = found
            plan.parts[key] = [Part(found, type(call.module).__name__, found.op)]
    turns: dict[object, Finding] = {}
    for call in seen:
        key = code_signature(call.module)
        if key in plan.parts or signature(call.module) in plan.parts:
            continue
        parts = [*_turning_parts(call.module, turned, turns), *_joining_parts(call, norms)]
        if parts:
            plan.parts[key] = parts
    reason = why_no_loss_head(replica)
    if reason is None:
        uses = Finding("linear_cross_entropy", "on", "logits are never made")
        plan.loss = uses
    elif replica.get_output_embeddings() is not None:
        plan.loss = Finding("linear_cross_entropy", "refused", reason)


def _find_leaf(call: _Seen) -> Finding | None:
    """What a norm or a feed-forward block is."""
    module = call.module
    tensors = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Tensor)]
    is_leaf = not any(True for _ in module.children())
    if tensors and (experts := find_experts(module, tensors, call.result)):
        return experts
    if tensors and (delta := find_delta(module, tensors[0], call.result)):
        return delta
    if not isinstance(call.result, Tensor) or not tensors or not tensors[0].is_floating_point():
        return None
    if is_leaf and len(tensors) == 1:
        return find_norm(module, tensors[0], call.result)
    if is_leaf and len(tensors) == 2:
        return find_gated_norm(module, tensors[0], tensors[1], call.result)
    return find_gate(module, tensors[0], call.result) if len(tensors) == 1 else None


def _record(replica: Any) -> tuple[list[_Seen], dict[tuple[type, str], tuple[Any, ...]]]:
    """The first call of every module, and of every turning function by class and name."""
    turned: dict[tuple[type, str], tuple[Any, ...]] = {}
    made = {kind: _tapped(kind, turned) for kind in {type(each) for each in replica.modules()}}
    with changed((each, "__class__", made[type(each)]) for each in list(replica.modules())):
        return _first_calls(replica, _TOKENS), turned


def _first_calls(replica: Any, shape: tuple[int, int]) -> list[_Seen]:
    seen: dict[nn.Module, _Seen] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        seen.setdefault(module, _Seen(module, args, kwargs, result))

    with ExitStack() as stack, torch.no_grad(), Wide():
        for each in replica.modules():
            stack.enter_context(each.register_forward_hook(hook, with_kwargs=True))
        _loss(replica, shape)
    return list(seen.values())


def _tapped(kind: type, turned: dict[tuple[type, str], tuple[Any, ...]]) -> type:
    """A class whose turning functions say what they were called with."""
    functions = turning_functions(kind)
    if not functions:
        return kind

    def tap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            turned.setdefault((kind, name), (function, args, kwargs))
            return function(*args, **kwargs)

        return call

    taps = {name: tap(name, function) for name, function in functions.items()}
    new = {
        name: redirected(method, taps)
        for name, method in methods(kind)
        if taps.keys() & names_in(inspect.unwrap(method).__code__)
    }
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **new})


def _turning_parts(
    module: nn.Module,
    turned: Mapping[tuple[type, str], tuple[Any, ...]],
    proved: dict[object, Finding],
) -> Iterator[Part]:
    """The turning functions of an attention module, and its linear layers."""
    kind = type(module)
    settings: dict[str, Any] = {"turning": ()}
    findings = []
    for (owner, name), (function, args, kwargs) in turned.items():
        if owner is not kind:
            continue
        key = (function, str([getattr(each, "shape", each) for each in (*args, *kwargs.items())]))
        if key not in proved:
            proved[key] = find_turn(function, args, kwargs)
        found = proved[key]
        findings.append(found)
        if found.verdict == "on":
            settings["turning"] += ((name, found.settings["turn"]),)
        else:
            yield Part(found, kind.__name__, "rope")
    if not settings["turning"]:
        return
    best = max((each for each in findings if each.verdict == "on"), key=lambda e: e.error or 0.0)
    yield Part(replace(best, forward=Rewritten, settings=settings), kind.__name__, "rope")
    linears = tuple(name for name, child in module.named_children() if is_linear(child))
    if len(linears) > 1:
        shared = Finding("rope", "on", "", None, None, Rewritten, {"linears": linears})
        yield Part(shared, kind.__name__, "read together")


def _joining_parts(call: _Seen, norms: Mapping[Signature, Finding]) -> Iterator[Part]:
    """A layer whose source adds and then calls one of its norms; all of them of one kind.

    Only where it does so with its settings: the lines may lie in a branch that it never takes.
    """
    module = call.module
    joined: dict[str, list[JoinedNorm]] = {}
    for name, child in module.named_children():
        found = norms.get(signature(child))
        if found is not None and found.verdict == "on":
            made = JoinedNorm(name, type(child), found.settings["made"])
            joined.setdefault(f"add_{found.op}", []).append(made)
    for op, those in joined.items():
        made_class: Any = subclass_of(type(module), Rewritten, {"norms": tuple(those)})
        ran = _joined_in(call, made_class) if made_class.joined else set()
        settings = {"norms": tuple(each for each in those if each.name in ran)}
        if ran:
            made_class = subclass_of(type(module), Rewritten, settings)
            detail = f"add, then {', '.join(made_class.joined)}"
            yield Part(
                Finding(op, "on", detail, None, None, Rewritten, settings),
                type(module).__name__,
                op,
            )
            return


@torch.no_grad()
def _joined_in(call: _Seen, made: type[Rewritten]) -> set[str]:
    """The norms that a layer's call takes additions into."""
    ran: set[str] = set()

    def add_norm(self: Any, name: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        ran.add(name)
        return made.add_norm(self, name, x, residual)

    tapped = type(made.__name__, (made,), {"add_norm": add_norm})
    try:
        with changed([(call.module, "__class__", tapped)]):
            call.module(*call.args, **call.kwargs)
    except FAILURES:
        return set(made.joined)  # the whole step will say why
    return ran


# The whole step.


def _settle(replica: Any, plan: Plan) -> None:
    """Take out what alone makes the whole another; set the error of what is left."""
    signatures = {module: plan.key_of(module) for module in replica.modules()}
    _silence(replica)
    with Wide():
        truth = _step(replica)
        with other_mode(replica):
            evaluated = _evaluated(replica)

    def attempt(labels: Iterable[str]) -> tuple[float, str]:
        try:
            found, _, _ = replace_labels(plan, set(labels)).swaps(replica, OPS, signatures)
            with Wide(), changed((each, "__class__", kind) for each, kind in found.items()):
                first = furthest(truth, _step(replica))
                with other_mode(replica):
                    second = relative(_evaluated(replica), evaluated), "the loss in evaluation"
            return max(first, second, key=lambda each: each[0])
        except FAILURES as error:
            return float("inf"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        finally:
            replica.zero_grad(set_to_none=True)

    labels = list(
        dict.fromkeys(
            part.label
            for parts in plan.parts.values()
            for part in parts
            if part.finding.verdict == "on"
        )
    )
    if plan.loss is not None and plan.loss.verdict == "on":
        labels.append("linear_cross_entropy")
    error, where = attempt(labels)
    if not error < WHOLE:
        alone = {label: attempt([label, *_NEEDS.get(label, ())]) for label in labels}
        for label, (its_error, its_where) in alone.items():
            if not its_error < WHOLE:
                plan.dropped[label] = _reported(its_error, its_where)
        left = [label for label in labels if label not in plan.dropped]
        error, where = attempt(left)
        if not error < WHOLE:  # only together
            plan.dropped.update(dict.fromkeys(left, _reported(error, where)))
            error = 0.0
    plan.whole_error = error
    if plan.loss is not None and "linear_cross_entropy" in plan.dropped:
        plan.loss = Finding("linear_cross_entropy", "refused", plan.dropped["linear_cross_entropy"])


_NEEDS = {"read together": ("rope",)}


def _reported(error: float, where: str) -> str:
    if error == float("inf"):
        return f"the whole model does not run with it: {where}"
    return f"the whole model is off by {error:.0e} with it, at {where}"


def replace_labels(plan: Plan, labels: set[str]) -> Plan:
    parts = {
        key: [part for part in each if part.label in labels] for key, each in plan.parts.items()
    }
    loss = plan.loss if "linear_cross_entropy" in labels else None
    return Plan(plan.model_type, {key: each for key, each in parts.items() if each}, loss)


def _step(replica: Any) -> dict[str, Tensor | None]:
    replica.zero_grad(set_to_none=True)
    loss = _loss(replica)
    loss.backward()
    gradients = {f"d {name}": each.grad for name, each in replica.named_parameters()}
    return {"the loss": loss.detach().double(), **gradients}


def _loss(replica: Any, shape: tuple[int, int] = _TOKENS) -> Tensor:
    loss: Tensor = replica(**_batch(replica, shape)).loss
    return loss + loss_of_a_small_image(replica)


_evaluated = torch.no_grad()(_loss)


def _silence(replica: Any) -> None:
    """No dropout: a comparison of the whole needs a function. Norms and gates were found before."""
    for owner in (*replica.modules(), replica.config, replica.config.get_text_config()):
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(owner, name, 0.0)
