"""One captured forward pass and the Jacobian blocks that its backward passes give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.memory import DATUM, in_slices
from laplace.engines.native.calls import Activations, LayerCall, block_of
from laplace.engines.native.capture import Capture
from laplace.engines.native.fallback import Fallback, per_sample
from laplace.engines.native.plan import Plan
from laplace.engines.profile import BatchProfile
from laplace.jacobian.blocks import Block, DenseBlock, LazyBlock, TensorShape
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import preserve_model
from laplace.weights.problem import Problem

_CACHED = 2**24
"""Bytes of output gradients, as they arrive and stacked, up to which stacking takes less than more rounds of sums."""

_LAZY_SHARE = 4
"""Dense fallback blocks above a quarter of the budget are computed piece by piece instead of held."""


class ForwardPass:
    """A captured forward pass with its proven plan: what the backward passes start from.

    Args:
        problem: The network and its random parameters.
        x: Inputs of B data.
        capture: What the hooks captured.
        plan: How the block of every tensor is made.
        memory_budget: Bytes of dense fallback blocks held at once.
        widest: Data of the largest batch among the processes that a network is spread over; None for B.

    Attributes:
        f: Outputs `[B·T, C]`, detached; T = 1 where a datum has one position.
    """

    def __init__(
        self, problem: Problem, x: Inputs, capture: Capture, plan: Plan, memory_budget: int, widest: int | None = None
    ) -> None:
        self.problem = problem
        self.x = x
        self.capture = capture
        self.plan = plan
        self.memory_budget = memory_budget
        self.widest = self.n_data if widest is None else widest
        self.f = capture.rows.detach()
        self.dtype = torch.promote_types(self.f.dtype, torch.float32)
        self._weights_dtype = torch.promote_types(problem.dtype, torch.float32)
        self._activations: Activations = {}
        self._of_zeros: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def n_data(self) -> int:
        """B."""
        return self.capture.f.shape[0]

    @property
    def positions(self) -> tuple[int, ...]:
        """The dimensions whose product is T; empty for outputs `[B, C]`."""
        return self.capture.positions

    def at_outputs(self, outputs: Tensor | None = None) -> Tensor:
        """Outputs `[B·T, C]`, with their graph if one was asked for; of K of every row, `[B·T, K]`."""
        rows = self.capture.rows if self.capture.create_graph else self.f
        return rows if outputs is None else rows.gather(1, outputs)

    def by_row(self, slot: int) -> bool:
        """True if the data of a tensor's block are rows: always without positions."""
        return not self.positions or self.plan[slot].by_row

    @property
    def mixes(self) -> bool:
        """True if some tensor needs cotangents of its own for every position."""
        return bool(self.positions) and not all(rule.by_row or rule.description == "unused" for rule in self.plan)

    def bytes_per_cotangent(self) -> int:
        """Bytes of output gradients that one cotangent holds; a head's are the cotangents themselves."""
        read = {use.call for rule in self.plan for use in rule.uses}
        entries = sum([self.capture.calls[n].shape.numel() for n in read - self.capture.heads])
        entries += self.capture.f.numel() if self.positions and self.mixes else 0
        return 2 * entries * self.f.element_size() * self.widest // max(1, self.n_data)

    def bytes_per_column(self) -> int:
        """The same with the cotangent itself, `[B, C]`, as it is made and in the dtype of the outputs."""
        own = 2 * self.f.numel() * self.f.element_size()
        return self.bytes_per_cotangent() + own * self.widest // max(1, self.n_data)

    def columns_at_once(self, *, together: bool) -> int:
        """Cotangents whose output gradients are held at once, within the memory budget.

        Of passes that run one by one on a CPU few, since many large ones take longer to stack than they save.

        Args:
            together: Whether a sum needs few cotangents no less than many: it adds a product per call, however many.
        """
        looped = self.capture.loop and not together and self.f.device.type == "cpu"
        budget = min(self.memory_budget, _CACHED) if looped else self.memory_budget
        return max(1, budget // self.bytes_per_column())

    def heads(self) -> list[int]:
        """Slots whose layer's outputs are the network's, with all entries random."""
        return list(self._heads)

    def head_blocks(self, slots: list[int]) -> dict[int, HeadBlock]:
        """Blocks of heads, which need no output gradients."""
        return {i: self._heads[i] for i in slots}

    @cached_property
    def _heads(self) -> dict[int, HeadBlock]:
        blocks = {i: self._by_row(self._without_gradients(i)) for i in range(len(self.plan)) if self._ends(i)}
        heads = {i: HeadBlock.of(block, self.f.shape[1]) for i, block in blocks.items() if block is not None}
        return {i: head for i, head in heads.items() if head is not None}

    def _by_row(self, block: Block) -> Block | None:
        """The block with rows for data: as it is without positions."""
        return block.fold_positions(self.capture.n_positions) if self.positions else block

    def _ends(self, slot: int) -> bool:
        """True if the outputs of a tensor's layer are the network's."""
        rule = self.plan[slot]
        return (
            len(rule.uses) == 1
            and self.problem.slots[slot].entries is None
            and (rule.is_head or not self.positions)
            and rule.uses[0].call in self.capture.heads
        )

    def _without_gradients(self, slot: int, calls: Sequence[LayerCall] | None = None) -> Block:
        """The block of a slot for one cotangent of zeros, which takes no backward pass and no memory."""
        recorded = self.capture.calls if calls is None else calls
        zeros = {use.call: self._zeros(use.call, recorded[use.call].x.device) for use in self.plan[slot].uses}
        return self._block(slot, recorded, zeros, self._activations if calls is None else None)

    def _zeros(self, call: int, device: torch.device) -> Tensor:
        """Gradients of one cotangent of zeros, of which one is held."""
        key = call, device
        if key not in self._of_zeros:
            self._of_zeros[key] = self.f.new_zeros((), device=device).expand(1, *self._gradient_shape(call))
        return self._of_zeros[key]

    def _block(
        self,
        slot: int,
        calls: Sequence[LayerCall],
        gradients: Mapping[int, Tensor],
        activations: Activations | None = None,
    ) -> Block:
        uses, dtype = self.plan[slot].uses, self._weights_dtype
        return block_of(self.problem, slot, uses, calls, gradients, self.n_data, dtype, activations)

    def _gradient_shape(self, call: int) -> torch.Size:
        """The shape of the gradients of one cotangent: that of a head's are the network's, also of reduced features."""
        is_known = not self.positions and call in self.capture.heads
        return self.capture.f.shape if is_known else self.capture.calls[call].shape

    def _form(self, slot: int) -> Block:
        """The block of a slot for one cotangent, of which the shapes count and not the numbers."""
        try:
            inputs = self._formal_inputs
            block = self._without_gradients(
                slot, [replace(call, x=x) for call, x in zip(self.capture.calls, inputs, strict=True)]
            )
        except (RuntimeError, TypeError):  # a rule that looks at the numbers
            block = self._without_gradients(slot)
        rows = None if self.mixes else self._by_row(block)
        return block if rows is None else rows

    def outline(self, *, n_columns: int, n_terms: int, product_budget: int, refused: bool) -> BatchProfile:
        """Profile of the batch by its shapes: without its graph, which is held by now, and without seconds.

        Args:
            n_columns: K.
            n_terms: E.
            product_budget: Bytes that the vectors of one pass may hold.
            refused: True if the columns are more backward passes than a batch may take.
        """
        return BatchProfile(
            layout=self.problem.layout, tensors=self._shapes(), n_data=self.n_data if self.mixes else len(self.f),
            n_outputs=self.f.shape[1], n_columns=n_columns, n_terms=n_terms, itemsize=self.dtype.itemsize,
            graph=0, widest=0, gradients=self.bytes_per_cotangent() // 2, budget=self.memory_budget,
            product_budget=product_budget, loop=self.capture.loop, refused=refused,
            inputs=sum(tensor.nbytes for tensor in batches.tensors(self.x)),
        )  # fmt: skip

    def _shapes(self) -> tuple[TensorShape, ...]:
        """Shapes of all tensors, from the forms of their factors alone; a rule keeps those that were found once."""
        shapes: list[TensorShape] = []
        for i, (slot, rule) in enumerate(zip(self.problem.slots, self.plan, strict=True)):
            if i in self._heads:
                shapes.append(self._heads[i].shape(()))
            elif rule.uses:
                calls = (self.capture.calls[use.call] for use in rule.uses)
                forms = tuple((call.x.shape, call.x.stride(), call.x.dtype, call.shape) for call in calls)
                key = self.capture.f.shape, self.positions, self.mixes, forms
                if key not in rule.shapes:
                    rule.shapes[key] = self._form(i).shape(self._formal_inputs)
                shapes.append(rule.shapes[key])
            else:
                shapes.append(TensorShape(slot.size, n_outputs=slot.size))
        return tuple(shapes)

    @cached_property
    def _formal_inputs(self) -> list[Tensor]:
        """Inputs of the right shapes without numbers: they take no memory, and no work."""
        return [call.x.to("meta") for call in self.capture.calls]

    def jacobian(self, outputs: Tensor | None = None, part: slice | None = None) -> Jacobian:
        """The Jacobian of the network's rows: one-hot cotangents, none for a head.

        Args:
            outputs: Of every row, `[B·T, K]`; None for all.
            part: Positions of the only datum; None for all rows.
        """
        heads = self.heads()
        rest = [i for i in range(len(self.plan)) if i not in heads]
        blocks: dict[int, Block] = dict(self.head_blocks(heads)) if heads else {}
        if outputs is not None:
            blocks = {i: block.select_outputs(outputs) for i, block in blocks.items()}
        if simple := [i for i in rest if self.by_row(i)]:
            blocks |= self._at_rows(outputs, simple)
        if part is not None:
            blocks = {i: block.at(part) for i, block in blocks.items()}
        if mixed := [i for i in rest if not self.by_row(i)]:
            blocks |= self._at_positions(torch.arange(self.capture.n_positions)[part or slice(None)], outputs, mixed)
        chosen = outputs if outputs is None or part is None else outputs[part]
        return Jacobian(tuple(blocks[i] for i in range(len(self.plan))), self.positions, outputs=chosen)

    def _at_rows(self, outputs: Tensor | None, only: list[int]) -> dict[int, Block]:
        """Blocks `[K, B·T, p]` of one-hot cotangents of all rows, few of which are held at once where there are many.

        Args:
            outputs: Of every row, `[B·T, K]`; None for all.
            only: Slots.
        """
        count = self.f.shape[1] if outputs is None else outputs.shape[1]
        step = max(1, self.memory_budget // (2 * self.f.numel() * self.f.element_size()))
        parts: list[dict[int, Block]] = []
        for start in range(0, count, step):
            hot = self._one_hot(outputs, slice(start, min(start + step, count)))
            parts.append(self.row_blocks(hot.expand(-1, len(self.f), -1), only))
        return {i: parts[0][i].join([part[i] for part in parts[1:]]) if len(parts) > 1 else parts[0][i] for i in only}

    def _one_hot(self, outputs: Tensor | None, some: slice) -> Tensor:
        """One-hot rows of some of the K outputs, `[k, B·T, C]`, or `[k, 1, C]` of those of all rows."""
        if outputs is None:
            hot = self.f.new_zeros(some.stop - some.start, 1, self.f.shape[1])
            hot[:, 0].diagonal(some.start).fill_(1)
            return hot
        at = outputs.T[some].unsqueeze(2)
        return self.f.new_zeros(*at.shape[:2], self.f.shape[1]).scatter_(2, at, 1.0)

    def _at_positions(self, at: Tensor, outputs: Tensor | None, only: list[int]) -> dict[int, Block]:
        """Blocks `[K, B·S, p]` of the rows of S positions, by S·K cotangents of the whole outputs.

        Args:
            at: The positions, `[S]`.
            outputs: Of every row, `[B·T, K]`; None for all.
            only: Slots.
        """
        n_positions = self.capture.n_positions
        n_data = 1 if outputs is None else self.n_data  # all outputs are those of any datum
        count = self.f.shape[1] if outputs is None else outputs.shape[1]
        hot = self._one_hot(outputs, slice(0, count)).expand(-1, n_data * n_positions, -1)
        rows = hot.unflatten(1, (n_data, n_positions))[:, :, at]  # [K, B, S, C]
        whole = hot.new_zeros(len(at), count, n_data, n_positions, hot.shape[2])
        whole[torch.arange(len(at)), :, :, at] = rows.permute(2, 0, 1, 3)
        cotangents = whole.flatten(3).flatten(0, 1).expand(-1, self.n_data, -1)
        return {i: block.fold_cotangents(len(at)) for i, block in self.blocks(cotangents, only).items()}

    def row_blocks(self, cotangents: Tensor, only: list[int]) -> dict[int, Block]:
        """Weighted blocks of slots whose data are rows, for cotangents `[K, B·T, C]`."""
        if not self.positions:
            return self.blocks(cotangents, only)
        blocks = self.blocks(cotangents.reshape(len(cotangents), self.n_data, -1), only)
        folded = {i: self._by_row(block) for i, block in blocks.items()}
        return {i: block for i, block in folded.items() if block is not None}

    def blocks(self, cotangents: Tensor, only: list[int]) -> dict[int, Block]:
        """Weighted blocks of the slots in `only` for cotangents `[K, B, T·C]`."""
        with torch.inference_mode(False):
            return self._captured(cotangents, only) | self._fallbacks(
                cotangents, [i for i in only if self.plan[i].fallback is not None]
            )

    def _captured(self, cotangents: Tensor, only: list[int]) -> dict[int, Block]:
        plan, capture = self.plan, self.capture
        needed = {use.call for i in only for use in plan[i].uses}
        gradients = capture.gradients(cotangents, sorted(needed))
        blocks: dict[int, Block] = {}
        for i in only:
            if plan[i].uses:
                blocks[i] = self._block(i, capture.calls, gradients, self._activations)
            elif plan[i].fallback is None:
                zero = torch.zeros((), dtype=self.dtype, device=self.f.device)
                blocks[i] = DenseBlock(zero.expand(len(cotangents), self.n_data, self.problem.slots[i].size))
        return blocks

    def _fallbacks(self, cotangents: Tensor, slots: list[int]) -> dict[int, Block]:
        """Dense blocks by the fallback ladder, held together if they are small, computed in pieces if not."""
        blocks: dict[int, Block] = {}
        for fallback in Fallback if slots else ():
            members = [i for i in slots if self.plan[i].fallback is fallback]
            entries = cotangents.shape[0] * self.n_data * sum(self.problem.slots[i].shape.numel() for i in members)
            if entries * self.dtype.itemsize * _LAZY_SHARE <= self.memory_budget:
                values = self._fallback(cotangents, members, fallback, slice(None))
                blocks |= {i: DenseBlock(v) for i, v in zip(members, values, strict=True)}
            else:
                blocks |= {i: self._lazy(cotangents, i, fallback) for i in members}
        return blocks

    def _lazy(self, cotangents: Tensor, slot: int, fallback: Fallback) -> Block:
        return LazyBlock(
            compute=lambda rows: self._fallback(cotangents, [slot], fallback, rows)[0],
            dims=(cotangents.shape[0], self.problem.slots[slot].size),
            span=(0, self.n_data),
            norm=cotangents.norm(),
        )

    def _fallback(self, cotangents: Tensor, slots: list[int], fallback: Fallback, rows: slice) -> list[Tensor]:
        if not slots:
            return []
        start, stop, _ = rows.indices(self.n_data)
        graph = self.capture.create_graph

        def computed(some: slice) -> list[Tensor]:
            part = slice(start + some.start, start + some.stop)
            whole = part == slice(0, self.n_data)
            x = self.x if whole else batches.select(self.x, part, self.n_data)
            return per_sample(self.problem, x, cotangents[:, part], slots, fallback, create_graph=graph)

        with preserve_model(self.problem.module), torch.inference_mode(False):
            step = self._fallback_step(cotangents.shape[0], slots)
            parts = [values for _, values in in_slices(stop - start, step, computed, DATUM)]
        return [torch.cat(values, 1).to(self.dtype) for values in zip(*parts, strict=True)]

    def _fallback_step(self, n_cotangents: int, slots: list[int]) -> int:
        """Data per call of the fallback, so that activations and gradients of all cotangents fit the budget."""
        entries = sum(self.problem.slots[i].shape.numel() for i in slots) + self.capture.f.shape[1]
        per_datum = n_cotangents * (4 * self.bytes_per_cotangent() // self.n_data + entries * self.dtype.itemsize)
        return max(1, self.memory_budget // per_datum)
