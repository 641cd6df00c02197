"""What each codec of each weight costs a model, estimated from one pass forward and one backward.

For an error ΔW of one weight, the divergence of the next token's distribution is, to second order,
half the Fisher information of the error. With G_s the gradient of Σ_t ln p(y_t) over a sequence s,
the labels y_t drawn from the model itself (their scores at different positions are uncorrelated),

    KL ≈ ½ E_s[⟨G_s, ΔW⟩²] ≈ ½ E_s[Σ_i ⟨G_s,i, ΔW_i⟩²]

a token: the errors of different rows i are taken as independent, those within a row are not, so
that errors that GPTQ lets cancel count as little as they cost. The rows are a sample, scaled by the
share of Σ ‖G_i‖² that they carry. For the head, whose outputs are the logits z, the sum over rows
is ½ Σ_t Σ_v p_v (1 − p_v) (ΔE_v x_t)². A table that is embedding and head has both, added.

Layers are read from the checkpoint one at a time, forward and then backward; hidden states lie in a
temporary folder. Memory holds one layer, its gradients, and the sampled rows of each sequence.
Sources: Fisher's use for pruning, LeCun et al. 1989; drawn labels, Martens 2014 and Kunstner et al.
2019; row-wise blocks, Frantar et al. 2022.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint, TensorInfo
from ..checkpoints.io.home import expanded
from ..checkpoints.views.usual import usual
from ..conversion.allocation import KEEP, Choice, Unit, allocatable, candidate_codecs, choices_of, unit_namer
from ..conversion.quantize import check_dense
from ..conversion.recipe import Recipe, recipe_of
from ..conversion.targets import Goal, goal_named
from ..conversion.transposed_experts import with_transposed_experts
from ..errors import FormatError, UnsupportedError
from ..quantizers import METHODS
from ..spec import Format
from ..tensor.qtensor import QTensor
from .matrices import Matrix, layer_matrices
from .running import first_inputs, run_layer, without_layers
from .sources import Source, layer_source
from .statistics import InputCollector
from .walk import InputRounder, Progress, multiplying, token_sequences

ROWS = 48
"""Rows of a matrix that are rounded to every candidate."""
EXPERT_ROWS = 8
"""The same of one expert."""
TABLE_ROWS = 1024
"""Rows of an embedding or head, those with the most information."""
HEAD_TOKENS = 1024
"""Tokens whose logits measure the head."""


@dataclass
class Sensitivities:
    """units    with bytes and divergence of each candidate
    kept     modules that are left dense: calibration does not reach them
    tokens   that passed through the model
    digest   identifies the tokens
    """

    units: list[Unit] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    tokens: int = 0
    digest: str = ""


def sensitivities(
    checkpoint: Checkpoint,
    layout: str,
    text: str | Path,
    method: str = "rtn",
    *,
    codecs: Sequence[str] = (),
    context: int = 512,
    sequences: int = 32,
    device: str = "auto",
    from_packed: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sensitivities:
    """The divergence that each candidate codec of each weight adds, nats a token.

    layout   the target's word
    text     path of a UTF-8 file; `sequences` of `context` tokens are taken evenly from it
    method   how weights are rounded: "rtn", "mse", "gptq"; "awq" is estimated as "mse", "learned" as
             "gptq"
    codecs   candidates; by default all of the target
    seed     of the drawn labels
    Raises CalibrationError for a text that is too short or a model without tokenizer,
    UnsupportedError for a model that calibration does not walk.
    """
    if method not in METHODS:
        raise FormatError(f"[quantize] method {method!r}; allowed: {', '.join(METHODS)}")
    method = {"awq": "mse", "learned": "gptq"}.get(method, method)
    goals = [goal_named(f"{layout}:{word}") for word in candidate_codecs(layout, codecs)]
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    check_dense(checkpoint, from_packed)
    name_of = unit_namer(checkpoint, layout)
    base = recipe_of(str(goals[0].target))
    checkpoint = usual(with_transposed_experts(checkpoint, base))
    source = layer_source(checkpoint, where)
    ids = token_sequences(source.tokenizer, expanded(text), context, sequences)
    with tempfile.TemporaryDirectory(prefix="halfbyte-") as folder:
        passes = _Passes(checkpoint, source, ids, where, Path(folder), seed)
        measured = _Measured(checkpoint, layout, goals, method, passes.tokens)
        passes.forward(progress)
        passes.logits(measured)
        passes.backward(measured, progress)
        passes.embedding(measured)
    if progress is not None:
        progress(2 * source.count, 2 * source.count, "")
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    return Sensitivities(measured.units(name_of), measured.kept(base), passes.tokens, digest)


@dataclass
class _Cost:
    """What is known of one weight."""

    info: TensorInfo
    formats: dict[str, tuple[Format, int]]
    kl: dict[str, float] = field(default_factory=dict)


class _Measured:
    """Divergences of weights, by module."""

    def __init__(self, checkpoint: Checkpoint, layout: str, goals: Sequence[Goal], method: str, tokens: int) -> None:
        self.checkpoint, self.layout, self.method, self.tokens = checkpoint, layout, method, tokens
        self._costs: dict[str, _Cost] = {}
        for info in checkpoint.infos():
            module = allocatable(info, layout)
            formats = {} if module is None else choices_of(info, goals)
            if module is not None and formats:
                self._costs[module] = _Cost(info, formats)

    def module(self, key: str | None) -> str | None:
        """The module of a key that has candidates."""
        module = None if key is None else key.removesuffix(".weight")
        return module if module in self._costs else None

    def add(
        self,
        module: str,
        rows: NDArray[np.float32],
        error: Callable[[Tensor], float],
        rounder: InputRounder,
        hessian: Tensor | None,
    ) -> None:
        """Round rows of a weight to every candidate; `error` gives the divergence of a difference,
        summed over the tokens.
        """
        cost = self._costs[module]
        weight = torch.from_numpy(np.ascontiguousarray(rows)).to(rounder_device(hessian))
        for codec, (fmt, _) in cost.formats.items():
            q = rounder.round(weight, hessian, fmt)
            difference = q.dequantize("float32") - rows
            kl = error(torch.from_numpy(difference)) / self.tokens
            cost.kl[codec] = cost.kl.get(codec, 0.0) + kl

    def units(self, name_of: Callable[[str], str]) -> list[Unit]:
        """The measured weights, those of a name together, in the checkpoint's order."""
        together: dict[str, list[tuple[str, _Cost]]] = {}
        for module, cost in self._costs.items():
            if cost.kl:
                together.setdefault(name_of(module), []).append((module, cost))
        return [_unit(name, members) for name, members in together.items()]

    def kept(self, recipe: Recipe) -> list[str]:
        """Modules that the target would round by default and that were not measured."""
        found = []
        for info in self.checkpoint.infos():
            module = allocatable(info, self.layout)
            measured = module in self._costs and bool(self._costs[module].kl)
            if module is not None and not measured and recipe.of(module, len(info.shape)) is not None:
                found.append(module)
        return found


def _unit(name: str, members: list[tuple[str, _Cost]]) -> Unit:
    common = [codec for codec in members[0][1].formats if all(codec in cost.formats for _, cost in members)]
    choices = [
        Choice(codec, sum(cost.formats[codec][1] for _, cost in members), sum(cost.kl[codec] for _, cost in members))
        for codec in common
    ]
    if len(members) == 1 and len(members[0][1].info.shape) == 2 and not members[0][1].info.quantized:
        choices.append(Choice(KEEP, members[0][1].info.nbytes, 0.0))
    weights = sum(int(np.prod(cost.info.shape)) for _, cost in members)
    return Unit(name, tuple(m for m, _ in members), weights, tuple(choices))


def rounder_device(hessian: Tensor | None) -> Any:
    """Where weights are rounded."""
    return "cpu" if hessian is None else hessian.device


class _Passes:
    """The passes over a model: forward, logits, backward, embedding."""

    def __init__(
        self, checkpoint: Checkpoint, source: Source, ids: list[list[int]], device: str, folder: Path, seed: int
    ) -> None:
        self.checkpoint, self.source, self.ids, self.device, self.folder = checkpoint, source, ids, device, folder
        self.tokens = sum(map(len, ids))
        self._random = torch.Generator().manual_seed(seed)
        self._arguments: list[tuple[Any, dict[str, Any]]] = []
        self._gradients: list[Tensor] = []

    def forward(self, progress: Progress | None) -> None:
        """Hidden states before every layer, and behind the last."""
        with torch.no_grad():
            hidden, self._arguments = first_inputs(self.source, self.ids, self.device)
            for number in range(self.source.count):
                if progress is not None:
                    progress(number, 2 * self.source.count, f"layer {number}, forward")
                torch.save(hidden, self._file(number))
                layer = self.source.layer(number)
                hidden = [run_layer(layer, h, self._arguments[number]) for h in hidden]
                self.source.drop(number)
        torch.save(hidden, self._file(self.source.count))

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.hidden"

    def _hidden(self, number: int) -> list[Tensor]:
        found: list[Tensor] = torch.load(self._file(number), weights_only=True)
        return found

    def logits(self, measured: _Measured) -> None:
        """Gradients of ln p of drawn labels behind the last layer, and the head's divergences."""
        head = self.source.model.get_output_embeddings()
        if head is None:
            raise UnsupportedError(
                f"[quantize] {type(self.source.model).__name__} has no head that predicts tokens, so no divergence can be "
                "estimated; name a codec"
            )
        module = measured.module(self._table_key(head))
        inputs: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
        mass: Tensor | None = None
        hidden = self._hidden(self.source.count)
        with without_layers(self.source) as run:
            for sequence, h in zip(self.ids, hidden, strict=True):
                h.requires_grad_()
                with torch.enable_grad():
                    logits = run(torch.tensor([sequence], device=h.device), h)[0]
                    log_p = torch.log_softmax(logits.float(), -1)
                    p = log_p.detach().exp()
                    labels = torch.multinomial(p.cpu(), 1, generator=self._random).to(p.device)
                    log_p.gather(1, labels).sum().backward()
                assert h.grad is not None
                self._gradients.append(h.grad)
                spread = (p * (1 - p)).sum(0, dtype=torch.float64)
                mass = spread if mass is None else mass + spread
            if module is not None and mass is not None:
                rows = torch.topk(mass, min(TABLE_ROWS, len(mass))).indices.sort().values
                inputs.clear()
                weights, seen = [], 0
                for sequence, h in zip(self.ids, hidden, strict=True):
                    if seen < HEAD_TOKENS:
                        with torch.no_grad():
                            p = torch.softmax(run(torch.tensor([sequence], device=h.device), h.detach())[0].float(), -1)[:, rows]
                        weights.append(p * (1 - p))
                        seen += len(sequence)
                x = torch.cat([i.reshape(-1, i.shape[-1]) for i in inputs]).float().cpu()
                w = torch.cat(weights).cpu()
                scale = float(mass.sum() / mass[rows].sum()) * self.tokens / len(x) / 2
                values = table_rows(self.checkpoint, self._table_key(head), rows.cpu().numpy())
                measured.add(
                    module,
                    values,
                    lambda d: scale * float((w * (x @ d.T).square()).sum(dtype=torch.float64)),
                    InputRounder("rtn" if measured.method == "rtn" else "mse"),
                    None,
                )
        handle.remove()

    def backward(self, measured: _Measured, progress: Progress | None) -> None:
        """Divergences of the layers' weights, the last layer first."""
        count = self.source.count
        for number in reversed(range(count)):
            if progress is not None:
                progress(2 * count - number - 1, 2 * count, f"layer {number}, backward")
            layer, prefix = self.source.layer(number), f"{self.source.prefix}.{number}"
            matrices = layer_matrices(layer, prefix, self.source.slots, lambda key: self.checkpoint.info(key).shape[-2])
            wanted = [_Sample(m, layer) for m in matrices if measured.module(m.key) is not None]
            for sample in wanted:
                sample.parameter.requires_grad_()
            with InputCollector(layer, *multiplying(layer), squares_only=measured.method == "rtn") as inputs:
                for i, h in enumerate(self._hidden(number)):
                    h = h.detach().requires_grad_()
                    with torch.enable_grad():
                        run_layer(layer, h, self._arguments[number]).backward(self._gradients[i])
                    inputs.sequence_done()
                    for sample in wanted:
                        sample.take()
                    for parameter in {id(s.parameter): s.parameter for s in wanted}.values():
                        parameter.grad = None
                    assert h.grad is not None
                    self._gradients[i] = h.grad
            self._round(measured, wanted, inputs)
            self.source.drop(number)
            self._file(number).unlink()

    def _round(self, measured: _Measured, wanted: list[_Sample], inputs: InputCollector) -> None:
        rounder = InputRounder(measured.method)
        last: Any = None
        hessian: Tensor | None = None
        for sample in sorted(wanted, key=lambda s: s.matrix.input):
            group = inputs.of(sample.matrix.input)
            if group is not last or group is None:
                rounder.next_input()
                hessian = None if group is None or group.hessian is None else group.hessian.double()
                last = group
            module = measured.module(sample.matrix.key)
            assert module is not None
            measured.add(module, sample.values(), sample.error, rounder, hessian)

    def embedding(self, measured: _Measured) -> None:
        """Divergences of the embedding: its gradients at the tokens of the text."""
        table = self.source.model.get_input_embeddings()
        key = self._table_key(table)
        module = measured.module(key)
        if module is None:
            return
        found: list[tuple[list[int], Tensor, float]] = []
        outputs: list[Tensor] = []

        def leaf(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            outputs.append(output.detach().requires_grad_())
            return outputs[-1]

        handle = table.register_forward_hook(leaf)
        for sequence, gradient in zip(self.ids, self._gradients, strict=True):
            with torch.enable_grad():
                (first,), _ = first_inputs(self.source, [sequence], self.device, again=True)
                first.backward(gradient)
            out = outputs.pop()
            assert out.grad is not None
            found.append((sequence, out.grad[0].float().cpu(), float(out.detach().norm())))
        handle.remove()
        rows = sorted({token for sequence, _, _ in found for token in sequence})
        values = table_rows(self.checkpoint, key, np.array(rows))
        at = {token: i for i, token in enumerate(rows)}
        gradients = torch.zeros(len(found), len(rows), values.shape[1])
        for g, (sequence, gradient, norm) in zip(gradients, found, strict=True):
            index = torch.tensor([at[token] for token in sequence])
            # Some models scale what they read from the table.
            scale = norm / max(float(np.linalg.norm(values[index.numpy()])), 1e-30)
            g.index_add_(0, index, gradient * scale)
        share = gradients.square().sum((0, 2))
        chosen = torch.topk(share, min(TABLE_ROWS, len(rows))).indices.sort().values
        factor = float(share.sum() / share[chosen].sum().clamp(min=1e-30)) / 2
        few = gradients[:, chosen]
        measured.add(
            module,
            values[chosen.numpy()],
            lambda d: factor * float((few * d).sum(2).square().sum(dtype=torch.float64)),
            InputRounder("rtn" if measured.method == "rtn" else "mse"),
            None,
        )

    def _table_key(self, module: nn.Module | None) -> str | None:
        """The key of an embedding's or head's weight; the embedding's for a tied head."""
        for wanted in (module, self.source.model.get_input_embeddings()):
            path = next((n for n, m in self.source.model.named_modules() if m is wanted), None)
            key = None if path is None else self.source.key_of(path, "weight")
            if key is not None:
                return key
        return None


class _Sample:
    """Rows of a matrix, and their gradients sequence by sequence."""

    def __init__(self, matrix: Matrix, layer: nn.Module) -> None:
        self.matrix = matrix
        storage = matrix.view.untyped_storage().data_ptr()
        self.parameter = next(p for p in layer.parameters() if p.untyped_storage().data_ptr() == storage)
        n = matrix.view.shape[0]
        most = ROWS if self.parameter.ndim == 2 else EXPERT_ROWS
        self.rows = torch.linspace(0, n - 1, min(most, n)).round().long().unique()
        self._gradients: list[Tensor] = []
        self._share = torch.zeros(n, dtype=torch.float64)

    def take(self) -> None:
        """Add the gradient of a sequence."""
        if self.parameter.grad is None:
            return
        view = self.matrix.view
        whole = self.parameter.grad.as_strided(view.shape, view.stride(), view.storage_offset())
        self._share += whole.square().sum(1, dtype=torch.float64).cpu()
        self._gradients.append(whole[self.rows.to(whole.device)].float().cpu())

    def values(self) -> NDArray[np.float32]:
        """The rows."""
        found: NDArray[np.float32] = self.matrix.view[self.rows.to(self.matrix.view.device)].detach().float().cpu().numpy()
        return found

    def error(self, difference: Tensor) -> float:
        """The divergence of a difference of the rows, summed over the tokens."""
        if not self._gradients:
            return 0.0
        total = sum(float((g * difference).sum(1).square().sum(dtype=torch.float64)) for g in self._gradients)
        share = float(self._share[self.rows].sum())
        return total / 2 * (float(self._share.sum()) / share if share else 1.0)


def table_rows(checkpoint: Checkpoint, key: str | None, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows of an embedding or head, in rising order."""
    assert key is not None
    table = checkpoint[key]
    if not isinstance(table, QTensor):
        return np.asarray(table[rows], np.float32)
    found = [table.rows(r, r + 1).dequantize("float32") for r in rows.tolist()]
    return np.concatenate(found)
