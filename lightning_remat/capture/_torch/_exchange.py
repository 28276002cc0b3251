"""What AOTAutograd runs for a captured graph, exchanged for other versions of it.

* ``TracingContext``'s metadata: AOTAutograd's notes on what a forward saves, which hold for its first version only, and
  on the layouts of tangents (see `Exchange`).
* ``MemoryFormatMeta``, ``PlainTensorMeta``: its note on each tangent.
* ``__torch_function__``: it copies what it takes for new values of inputs (see `_Written`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.fx
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta

from lightning_remat.capture._tangents import Given
from lightning_remat.capture._torch._fake import real_tensors
from lightning_remat.capture._torch._running import Arrival, Modules, ObserveNode, Runner, boxed
from lightning_remat.capture._torch._tensors import address_of
from lightning_remat.capture._torch._views import hands_back, written

MOST_VERSIONS = 64
"""Versions of one captured graph that are kept ready to run (a megabyte or more for every few hundred operations)."""

_Version = tuple[Runner, Runner, torch.Tensor]


class _Outputs(tuple[Any, ...]):
    """What a version's forward returns, whose ``len`` is ``told``; iteration and slices give all of it.

    Attributes:
        told: how many outputs the first version has: AOTAutograd goes by that.
    """

    told: int

    def __len__(self) -> int:
        return self.told


class _Written:
    """Stands for an output that is an input which was written to: copied to that input, it does nothing. It is no tensor,
    of which autograd would make a view.
    """

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:
        return args[0]


_WRITTEN = _Written()

_COPIES = "tensors are copied to the host and back, on streams of their own"
"""Why a version with such copies is not recorded."""

_CALLS = 1 << 20
"""What a call's number is multiplied by beside a version's."""


class Recorder(Protocol):
    """Runs forwards and backwards (see `lightning_remat.runtime._recordings`).

    Attributes:
        serial: number of the call whose forward was replayed just now, 0 where it was not.
    """

    serial: int

    def forward(self, version: int, run: Callable[[list[Any]], Any], args: list[Any], returned: int) -> Sequence[Any]:
        """A forward's outputs."""

    def backward(
        self, serial: int, version: int, run: Callable[[list[Any]], Any], args: list[Any], saved: int, usual: bool
    ) -> Sequence[Any]:
        """What a backward returns."""

    def wait_for(self, saved: torch.Tensor) -> None:
        """The backward of the forward that was replayed just now may come as long as there is this tensor."""

    def told(self, reason: str) -> None:
        """A version runs unrecorded, for this reason."""


class Staged(Protocol):
    """Runs a backward in stages (see ``capture.gradients._stages``)."""

    def begin(self, running: Any, dropped: Collection[int], done: Callable[[], None] | None) -> list[Any]:
        """The gradients of the first stage, and ``None`` for the others."""

    def begin_with(self, found: Sequence[Any]) -> list[Any]:
        """The same where all gradients are there already."""


def _inputs_among(modules: Modules) -> list[int]:
    """By position of an output, the position of the input that it is; -1 for what is no input."""
    places = {node: i for i, node in enumerate(modules.forward.graph.find_nodes(op="placeholder"))}
    outputs: Any = modules.forward.graph.output_node().args[0]
    found = []
    for one in outputs[: modules.returned]:
        while hands_back(one):
            (one,) = written(one)
        found.append(places.get(one, -1))
    return found


def _names(modules: Modules) -> tuple[str, ...]:
    """Names of what a forward hands over to its backward, in order."""
    outputs: Any = modules.forward.graph.output_node().args[0]
    return tuple(str(one) for one in outputs[modules.returned :])


class Exchange:
    """What AOTAutograd runs for one captured graph: one of several versions of it, each a forward and its backward.

    AOTAutograd fixes how many outputs and sizes a forward returns, but not how many tensors it saves, so that versions
    may save different ones. Three of its notes on the first version's saved tensors must not bind the others: which of
    them have symbolic sizes (their ``meta["val"]`` is taken away), since torch 2.14 which are inputs, so that no
    aliases are made of these (it is told that none are, as before), and, in torch 2.14 with tensor subclasses, how many
    they are (see `_Outputs`). Each forward also saves its version's number, by which its backward is found, however
    many calls wait for theirs. One thread at a time may call it.

    Of versions that can be made again, those that ran last are kept (`MOST_VERSIONS`); one that is gone is made again when it
    is to run, or when the backward of one of its forwards begins.

    Attributes:
        current: the version that the next forward runs.
        dropped: positions of gradients for which the next backward returns ``None``.
        unread: the tangents (targets of placeholders) that are absent in the next backward: autograd gives zeros for
            them.
        without: makes a backward with such tangents left out.
        summands: see `Modules`.
        opens: whether the sums of the next backward are taken apart (see ``capture.gradients._sums``).
        opened: makes a backward that does so.
        summed: what that returns: by the position of a gradient, the positions of its other summands.
        taken: called by the next backward with the summands that it returns beyond its gradients.
        ported: tangents of the next backward that autograd gives zeros for, by their positions among its arguments,
            counted from the end (see ``capture.gradients._ports``).
        instead: what the next backward returns in place of what it would compute.
        done: called when the next backward has run.
        staged: runs the next backward in stages; ``None`` where it runs as a whole.
        in_stages: makes a backward that does so.
        apart: whether the next forward hands out copies of what it also saves.
        changed: positions of outputs that it hands out copies of in any case, where it saves them.
        moving: addresses of what the next forward is given, and saves copies of.
        places: where what it then handed out lies: by address, the positions of the outputs.
        observe: where it is set, every op is run through it (slow).
        recorder: where it is set, it runs forwards and backwards, and may replay recorded ones.
    """

    def __init__(self) -> None:
        self.current = 0
        self.dropped: frozenset[int] = frozenset()
        self.unread: frozenset[str] = frozenset()
        self.without: Callable[[torch.fx.GraphModule, frozenset[str]], torch.fx.GraphModule] = lambda module, _: module
        self.summands = 0
        self.opens = False
        self.opened: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = lambda module: module
        self.summed: Mapping[int, Sequence[int]] = {}
        self.taken: Callable[[Sequence[Any]], None] | None = None
        self.ported: Mapping[int, torch.Tensor] = {}
        self.instead: Sequence[Any] | None = None
        self.done: Callable[[], None] | None = None
        self.staged: Staged | None = None
        self.in_stages: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = lambda module: module
        self.apart = False
        self.changed: frozenset[int] = frozenset()
        self.moving: Collection[int] = ()
        self.places: dict[int, frozenset[int]] = {}
        self.observe: ObserveNode | None = None
        self.recorder: Recorder | None = None
        self._versions: dict[int, _Version] = {}  # the one that ran last at the end
        self._unrecorded: set[int] = set()
        self._saving_nothing: set[int] = set()
        self._made_again: dict[int, tuple[Callable[[], Modules], tuple[str, ...]]] = {}
        self._added = 0
        self._returned = self._sizes = self._told = self._given = -1
        self._most_saved = 0
        self._inputs_saved: list[bool] = []
        self._inputs: list[int] = []  # of the first version (see `_inputs_among`)
        self._written: dict[int, int] = {}  # those of them that were written to
        self._tangents: list[Any] = []  # AOTAutograd's notes on them, and the layouts that these say at first
        self._expected: list[Any] = []
        self._arrival: Arrival = frozenset()

    def add(self, modules: Modules, again: Callable[[], Modules] | None = None) -> int:
        """Add a version, and return its number. ``again`` makes the same modules once more.

        Raises:
            ValueError: where its forward has other numbers of outputs or sizes than the first version's.
        """
        if self._added and (modules.returned, modules.sizes) != (self._returned, self._sizes):
            raise ValueError(
                f"{modules.returned} outputs and {modules.sizes} sizes are no version of {self._returned} and {self._sizes}"
            )
        inputs = _inputs_among(modules)
        if any(inputs[i] != place for i, place in self._written.items()):
            raise ValueError("a forward that does not write over its inputs is no version of one that does")
        self._returned, self._sizes, self._inputs = modules.returned, modules.sizes, inputs
        number, self._added = self._added, self._added + 1
        outputs: Any = modules.forward.graph.output_node().args[0]
        if modules.copies:
            self._unrecorded.add(number)
        if again is not None:
            self._made_again[number] = again, _names(modules)
        self._put(number, modules)
        self._most_saved = max(self._most_saved, len(outputs) - modules.returned - modules.sizes + 1)
        self._note_inputs()
        return number

    def _put(self, number: int, modules: Modules) -> _Version:
        outputs: Any = modules.forward.graph.output_node().args[0]
        if number == 0:
            self._told = len(outputs)
            names = (str(node.target) for node in modules.backward.graph.find_nodes(op="placeholder"))
            self._given = sum(name.startswith("tangents") for name in names)
        with real_tensors():
            mark = torch.tensor(number, device="cpu")
        version = self._versions[number] = Runner(modules.forward), Runner(modules.backward), mark
        saved = outputs[modules.returned : len(outputs) - modules.sizes]
        for one in saved:
            one.meta.pop("val", None)
        if not saved:
            self._saving_nothing.add(number)
        ready = [one for one in self._versions if one in self._made_again]
        for one in ready[: max(0, len(ready) - MOST_VERSIONS)]:
            del self._versions[one]
        return version

    def _version(self, number: int) -> _Version:
        """A version that is kept, or made again.

        Raises:
            RuntimeError: where it is made again and saves something else.
        """
        if number in self._versions:
            found = self._versions[number] = self._versions.pop(number)
            return found
        again, names = self._made_again[number]
        modules = again()
        if _names(modules) != names:  # a backward may wait for what a forward of the first has saved
            raise RuntimeError(
                "a schedule was lowered again, and came out otherwise: this is a defect of lightning_remat"
            )
        return self._put(number, modules)

    def saves_nothing(self, number: int) -> bool:
        """Whether a version's forward leaves no tensor to its backward."""
        return number in self._saving_nothing

    def noted_by(self, metadata: Any) -> None:
        """Change AOTAutograd's notes on the first version, which it reads at run time, so that they hold for all."""
        self._inputs_saved = getattr(metadata, "saved_tensor_is_graph_input", [])
        self._note_inputs()
        metadata.bw_donated_idxs = []  # no saved tensor is marked for the backward to write over
        # Views among the outputs are none that autograd knows already, and count changes with what they are views of.
        metadata.unsafe_view_out_indices, metadata.num_unsafe_view_outputs = [], 0
        if all(isinstance(note, PlainTensorMeta) for note in metadata.subclass_tangent_meta):
            self._tangents = list(metadata.subclass_tangent_meta)
            self._expected = [note.memory_format for note in self._tangents]
        if all(isinstance(note, PlainTensorMeta) for note in metadata.subclass_inp_meta):
            new = enumerate(metadata.mutated_inp_runtime_indices)
            data_alone = [note.mutates_data and not note.mutates_metadata for note in metadata.input_info]
            self._written = {i: place for i, place in new if self._inputs[i] == place and data_alone[place]}

    def _note_inputs(self) -> None:
        self._inputs_saved[:] = [False] * self._most_saved

    def expect(self, tangents: Sequence[Given | None]) -> bool:
        """Have AOTAutograd hand on the tangents of the next backward as they come; returns whether it will.

        Args:
            tangents: their shapes and strides, in order; one with ``None`` is copied to the layout that it was traced
                with.
        """
        if len(tangents) != len(self._tangents):
            return False
        for note, expected, given in zip(self._tangents, self._expected, tangents, strict=True):
            if given is None:
                note.memory_format = expected
            else:
                note.memory_format = MemoryFormatMeta(size=torch.Size(given[0]), stride=given[1])
        return True

    def knows(self, number: int, arrival: Arrival) -> bool:
        """Whether a version has a backward for tangents with these layouts."""
        return arrival in self._version(number)[1].laid_out

    def arrive(self, number: int, arrival: Arrival, backward: torch.fx.GraphModule | None = None) -> None:
        """Say which layouts the tangents of the next backward have, one of this version.

        Args:
            number: the version.
            arrival: the layouts.
            backward: made for them; needed where the version does not know one (`knows`).
        """
        self._arrival = arrival
        if backward is not None:
            self._version(number)[1].laid_out[arrival] = Runner(backward)

    def forward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run the current version's forward."""
        run, _, number = self._version(self.current)
        recorder = self._recorder(self.current)
        inputs = {address_of(one) for one in args} if self.apart or self.changed else set()
        if recorder is None:
            outputs = run(args, self.observe)
        else:
            outputs = recorder.forward(self.current, run.alone, args, self._returned)
            if recorder.serial:
                number = torch.tensor(self.current + _CALLS * recorder.serial, device="cpu")
                recorder.wait_for(number)
        returned = [_WRITTEN if i in self._written else one for i, one in enumerate(outputs[: self._returned])]
        saved = outputs[self._returned :]
        if self.apart or self.changed:
            self._set_apart(returned, inputs, {address_of(one) for one in saved})
        if self.moving:
            saved = [
                _on(one.untyped_storage().clone(), one) if address_of(one) in self.moving else one for one in saved
            ]
        given = _Outputs((*returned, number, *saved))
        given.told = self._told
        return given

    def _set_apart(self, returned: list[Any], inputs: Collection[int | None], saved: Collection[int | None]) -> None:
        """Put outputs that lie at the addresses of what is saved on copies; those that share memory still do.

        Args:
            returned: the outputs; changed.
            inputs: addresses of what the forward was given: what lies there stays.
            saved: addresses of what it saves.
        """
        lie: dict[int, list[int]] = {}
        for i, one in enumerate(returned):
            address = address_of(one)
            if address is not None and address not in inputs:
                lie.setdefault(address, []).append(i)
        self.places = {}
        for address, positions in lie.items():
            if address in saved and (self.apart or not self.changed.isdisjoint(positions)):
                storage = returned[positions[0]].untyped_storage().clone()
                address = storage.data_ptr()
                for i in positions:
                    returned[i] = _on(storage, returned[i])
            self.places[address] = frozenset(positions)

    def backward(self, args: list[Any]) -> Any:
        """Run the backward of the version whose forward saved ``args``."""
        call, number = divmod(int(args.pop(self._sizes)), _CALLS)
        dropped, self.dropped = self.dropped, frozenset()
        ported, self.ported = self.ported, {}
        usual = not (dropped or ported or self.summands)
        for i, tangent in ported.items():
            args[i] = tangent
        del ported
        summands = self.summands
        if self.opens:
            summands = sum(map(len, self.summed.values()))
            dropped = dropped.union(*(self.summed.get(i, ()) for i in dropped))
        taken, self.taken = self.taken, None
        done, self.done = self.done, None
        staged, self.staged = self.staged, None
        run = self._backward(number)
        instead, self.instead = self.instead, None
        if instead is not None:
            if done is not None:
                done()
            return instead
        if staged is not None and self.observe is None:
            if run.in_stages is None:
                run.in_stages = boxed(self.in_stages(run.module))
            return staged.begin(run.in_stages(args), dropped, done)
        recorder = self._recorder(number)
        if recorder is None:
            found = run(args, self.observe)
        else:
            usual = usual and run is self._version(number)[1]
            found = recorder.backward(call, number, run.alone, args, len(args) - self._given, usual)
        if dropped:
            found = tuple(None if i in dropped else one for i, one in enumerate(found))
        if summands and taken is not None:
            taken(found[len(found) - summands :])
        if done is not None:
            done()
        found = found[: len(found) - summands]
        return found if staged is None else staged.begin_with(found)

    def _recorder(self, version: int) -> Recorder | None:
        """What runs a version's forward or backward, if not the version itself."""
        if self.recorder is None or self.observe is not None:
            return None
        if version in self._unrecorded:
            self.recorder.told(_COPIES)
            return None
        return self.recorder

    def _backward(self, number: int) -> Runner:
        """What runs the next backward of a version."""
        unread, self.unread = self.unread, frozenset()
        arrival, self._arrival = self._arrival, frozenset()
        run = self._version(number)[1]
        if arrival:
            run = run.laid_out[arrival]
        if unread and unread not in run.without:
            module = self.without(run.module, unread)
            run.without[unread] = run if module is run.module else Runner(module)
        run = run.without[unread] if unread else run
        opens, self.opens = self.opens, False
        if opens and run.opened is None:
            run.opened = Runner(self.opened(run.module))
        return run.opened if opens and run.opened is not None else run


def _on(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, on this storage."""
    lies = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *lies)
