"""The networks of Kumar et al. 2019, section 4, as forward and backward computation graphs, op by op.

The paper takes TensorFlow's graphs of the official models. Here they are written down by the ops of their layers, with one
reverse-mode rule an op, as TensorFlow's gradients have them. What is the same: the ops that touch activations and
gradients, reshapes and transposes among them, each with an output of its own (the paper leaves aliasing and work in place
out), sizes in bytes of float32, gradients that are consumed by the update of their weight at once, and one final node that
everything leads to. What is left out: initializers, shapes, summaries, queues, the learning rate's schedule and weight
decay, which hold next to no memory: hence fewer nodes than in Table 1. Weights and optimizer state are held by the caller
and not counted. Every op costs 1 (section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_remat.graph import ComputationGraph, Op, Tensor

Pull = Callable[[int], list[tuple[int, int]]]
"""From the gradient of an op's output to pairs of an input and its gradient."""


class Tape:
    """Ops in order, each with one output, and how their gradients are computed.

    Args:
        hold_gradients: the final node reads the gradients of all weights: they are all there at the end.

    Attributes:
        sizes: of each op's output, in elements.
    """

    def __init__(self, hold_gradients: bool = False) -> None:
        self._hold_gradients = hold_gradients
        self.sizes: list[int] = []
        self._ops: list[tuple[str, tuple[int, ...]]] = []
        self._pulls: list[Pull | None] = []
        self._updates: list[int] = []
        self._shared: dict[str, list[int]] = {}

    def op(self, name: str, inputs: Sequence[int], elements: int, pull: Pull | None = None) -> int:
        """Append an op; returns its index. Without ``pull`` no gradient flows through it."""
        self._ops.append((name, tuple(dict.fromkeys(inputs))))
        self.sizes.append(elements)
        self._pulls.append(pull)
        return len(self._ops) - 1

    def train(self, loss: int, name: str) -> ComputationGraph:
        """Append the backward pass and the final node; returns the graph."""
        gradients: dict[int, list[int]] = {loss: [self.op("ones", [], 1)]}
        for index in range(loss, -1, -1):
            found, pull = gradients.pop(index, []), self._pulls[index]
            if found and pull:
                total = found[0] if len(found) == 1 else self.op("add_n", found, self.sizes[index])
                for source, gradient in pull(total):
                    gradients.setdefault(source, []).append(gradient)
        for parts in self._shared.values():
            self.update(self.op("add_n", parts, self.sizes[parts[0]]))
        final = self.op("train_op", [*self._updates, loss], 1)
        needed, stack = {final}, [final]
        while stack:
            fresh = set(self._ops[stack.pop()][1]) - needed
            needed |= fresh
            stack.extend(fresh)
        number = {index: i for i, index in enumerate(sorted(needed))}
        ops = []
        for index, i in number.items():
            kind, reads = self._ops[index]
            ops.append(Op(f"{kind}_{i}", kind, tuple(number[r] for r in reads), (i,), seconds=1.0))
        # The paper knows of no boundary between forward and backward: all that counts is the final node (section 2.1).
        return ComputationGraph(
            tuple(ops),
            tuple(Tensor(f"t{i}", i) for i in number.values()),
            tuple(4 * self.sizes[index] for index in number),
            forward_outputs=(number[final],),
            name=name,
        )

    # -- ops and their gradients --------------------------------------------------------------------------------------

    def data(self, elements: int) -> int:
        """A batch that is read in."""
        return self.op("data", [], elements)

    def update(self, gradient: int, shared: str = "") -> None:
        """The optimizer's step for one weight: it consumes the gradient and returns a handle.

        The gradients of a ``shared`` weight, one a use, are added first.
        """
        if shared:
            self._shared.setdefault(shared, []).append(gradient)
        else:
            self._updates.append(gradient if self._hold_gradients else self.op("apply", [gradient], 0))

    def each(self, name: str, x: int, *, elements: int | None = None, reads: str = "") -> int:
        """An op of one input whose gradient reads nothing beside, its ``"input"`` or its ``"output"``."""

        def pull(dy: int) -> list[tuple[int, int]]:
            beside = {"": [], "input": [x], "output": [y]}[reads]
            return [(x, self.op(f"{name}_grad", [dy, *beside], self.sizes[x]))]

        y = self.op(name, [x], self.sizes[x] if elements is None else elements, pull)
        return y

    def add(self, a: int, b: int) -> int:
        """The sum, the smaller operand broadcast."""
        size = max(self.sizes[a], self.sizes[b])

        def pull(dy: int) -> list[tuple[int, int]]:
            return [(x, dy if self.sizes[x] == size else self.op("sum", [dy], self.sizes[x])) for x in (a, b)]

        return self.op("add", [a, b], size, pull)

    def mul(self, a: int, b: int, *, constant: bool = False) -> int:
        """The product, the smaller operand broadcast; no gradient flows to a ``constant`` second operand."""
        size = max(self.sizes[a], self.sizes[b])

        def pull(dy: int) -> list[tuple[int, int]]:
            found = []
            for x, other in ((a, b),) if constant else ((a, b), (b, a)):
                gradient = self.op("mul_grad", [dy, other], size)
                found.append((x, gradient if self.sizes[x] == size else self.op("sum", [gradient], self.sizes[x])))
            return found

        return self.op("mul", [a, b], size, pull)

    def weighted(self, name: str, x: int, elements: int, weight: int, shared: str = "") -> int:
        """A convolution or a product with a weight of ``weight`` elements, which other ops may have a name for too."""

        def pull(dy: int) -> list[tuple[int, int]]:
            self.update(self.op(f"{name}_grad_weight", [x, dy], weight), shared)
            return [(x, self.op(f"{name}_grad_input", [dy], self.sizes[x]))]

        return self.op(name, [x], elements, pull)

    def bias(self, x: int, channels: int) -> int:
        """A bias of ``channels`` elements added."""

        def pull(dy: int) -> list[tuple[int, int]]:
            self.update(self.op("bias_grad", [dy], channels))
            return [(x, dy)]

        return self.op("bias", [x], self.sizes[x], pull)

    def scale(self, x: int, channels: int) -> int:
        """A product with a weight of ``channels`` elements, broadcast."""

        def pull(dy: int) -> list[tuple[int, int]]:
            gradient = self.op("mul_grad", [x, dy], self.sizes[x])
            self.update(self.op("sum", [gradient], channels))
            return [(x, self.op("mul_grad", [dy], self.sizes[x]))]

        return self.op("mul", [x], self.sizes[x], pull)

    def matmul(self, a: int, b: int, elements: int) -> int:
        """A product of two activations."""

        def pull(dy: int) -> list[tuple[int, int]]:
            return [(x, self.op("matmul_grad", [dy, other], self.sizes[x])) for x, other in ((a, b), (b, a))]

        return self.op("matmul", [a, b], elements, pull)

    def batch_norm(self, x: int, channels: int) -> int:
        """The fused kernel: its gradient reads the input."""

        def pull(dy: int) -> list[tuple[int, int]]:
            dx = self.op("batch_norm_grad", [dy, x], self.sizes[x])
            self.update(self.op("batch_norm_grad_scale", [dx], 2 * channels))
            return [(x, dx)]

        return self.op("batch_norm", [x], self.sizes[x], pull)

    def softmax(self, x: int) -> int:
        """Softmax, and its gradient in four ops."""
        size = self.sizes[x]

        def pull(dy: int) -> list[tuple[int, int]]:
            total = self.op("sum", [self.op("mul", [dy, y], size)], max(1, size // 256))
            return [(x, self.op("mul", [self.op("sub", [dy, total], size), y], size))]

        y = self.op("softmax", [x], size, pull)
        return y

    def dropout(self, x: int) -> int:
        """Random numbers, a mask of one byte an element, and the product of its cast: as from TensorFlow 1.14 on."""
        size = self.sizes[x]
        keep = self.op("greater_equal", [self.op("random_uniform", [], size)], size // 4)
        return self.mul(self.each("mul", x), self.op("cast", [keep], size), constant=True)

    def layer_norm(self, x: int, channels: int) -> int:
        """The official Transformer's, which is made of elementwise ops."""
        rows = self.sizes[x] // channels
        mean = self.each("mean", x, elements=rows)
        variance = self.each("mean", self.each("square", self.add(x, mean), reads="input"), elements=rows)
        inverse = self.each("rsqrt", self.each("add", variance), reads="output")
        return self.bias(self.scale(self.mul(self.add(x, mean), inverse), channels), channels)

    def dense(self, x: int, before: int, after: int, *, bias: bool = False, shared: str = "") -> int:
        """A dense layer on rows: TensorFlow flattens, multiplies and gives the shape back."""
        size = self.sizes[x] // before * after
        y = self.each("reshape", self.weighted("matmul", self.each("reshape", x), size, before * after, shared))
        return self.bias(y, after) if bias else y

    def cross_entropy(self, logits: int, labels: int) -> int:
        """Softmax cross-entropy against ``labels``, a distribution: the kernel returns the gradient along with the loss."""
        size = self.sizes[logits]

        def pull(dy: int) -> list[tuple[int, int]]:
            return [(logits, self.op("mul", [dy, kernel], size))]

        kernel = self.op("cross_entropy", [logits, labels], size)
        return self.op("mean", [kernel], 1, pull)


def feed_forward(layers: int, width: int = 1024, batch: int = 1024) -> ComputationGraph:
    """Hidden layers with ReLU, mean squared error, gradient descent. The paper gives neither width nor batch: with both
    the same, activations and the gradients of the matrices are unit sizes."""
    tape = Tape()
    x = tape.data(batch * width)
    for _ in range(layers):
        x = tape.each(
            "relu", tape.bias(tape.weighted("matmul", x, batch * width, width * width), width), reads="output"
        )
    y = tape.bias(tape.weighted("matmul", x, batch * width, width * width), width)
    error = tape.add(y, tape.data(batch * width))
    loss = tape.each("mean", tape.each("square", error, reads="input"), elements=1)
    return tape.train(loss, f"feed-forward network, {layers} layers")


BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""Blocks in the four stages of each depth; from 50 layers on they are bottlenecks."""


def resnet(depth: int, batch: int = 32) -> ComputationGraph:
    """The official model for ImageNet, version 1, at its default batch and 224 × 224 pixels."""
    tape = Tape()

    def conv(x: int, before: int, after: int, kernel: int, side: int, stride: int = 1) -> int:
        if stride > 1 and kernel > 1:
            x = tape.each("pad", x)
        side //= stride
        y = tape.weighted("conv", x, batch * after * side * side, kernel * kernel * before * after)
        return tape.batch_norm(y, after)

    bottleneck = depth >= 50
    expansion = 4 if bottleneck else 1
    x = tape.each("relu", conv(tape.data(batch * 3 * 224 * 224), 3, 64, 7, 224, 2), reads="output")
    x = tape.each("max_pool", x, elements=batch * 64 * 56 * 56, reads="input")
    side, before = 56, 64
    for stage, blocks in enumerate(BLOCKS[depth]):
        filters = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            after = filters * expansion
            shortcut = conv(x, before, after, 1, side, stride) if not block else x
            if bottleneck:
                y = tape.each("relu", conv(x, before, filters, 1, side), reads="output")
                y = tape.each("relu", conv(y, filters, filters, 3, side, stride), reads="output")
                y = conv(y, filters, after, 1, side // stride)
            else:
                y = tape.each("relu", conv(x, before, filters, 3, side, stride), reads="output")
                y = conv(y, filters, filters, 3, side // stride)
            x = tape.each("relu", tape.add(y, shortcut), reads="output")
            side, before = side // stride, after
    logits = tape.dense(tape.each("mean", x, elements=batch * before), before, 1001, bias=True)
    return tape.train(tape.cross_entropy(logits, tape.data(batch * 1001)), f"ResNet {depth}")


def transformer(
    layers: int = 6, *, big: bool = False, length: int = 256, hold_gradients: bool = False
) -> ComputationGraph:
    """The official Transformer at its default sizes: 2048 tokens a batch in the base model and 4096 in the big one, in
    sentences of ``length`` tokens on both sides (the paper does not say how its batches are filled).

    With ``hold_gradients`` the gradients of all weights are there at the end (see `Tape`)."""
    width, inner, heads, tokens = (1024, 4096, 16, 4096) if big else (512, 2048, 8, 2048)
    vocabulary, size = 33708, tokens * width
    scores = tokens * length * heads
    tape = Tape(hold_gradients)

    def embedded() -> int:
        x = tape.weighted("gather", tape.data(tokens), size, vocabulary * width, "embedding")
        x = tape.each("mul", tape.each("mul", x))  # the mask of what pads, and the scale
        return tape.dropout(tape.add(x, tape.data(length * width)))

    def split(x: int) -> int:
        return tape.each("transpose", tape.each("reshape", x))

    def attention(x: int, source: int) -> int:
        query = tape.each("mul", split(tape.dense(x, width, width)))
        key, value = split(tape.dense(source, width, width)), split(tape.dense(source, width, width))
        weights = tape.softmax(tape.each("add", tape.matmul(query, key, scores)))
        mixed = tape.matmul(tape.dropout(weights), value, size)
        return tape.dense(tape.each("reshape", tape.each("transpose", mixed)), width, width)

    def feed(x: int) -> int:
        hidden = tape.each("relu", tape.dense(x, width, inner, bias=True), reads="output")
        return tape.dense(tape.dropout(hidden), inner, width, bias=True)

    def wrapped(x: int, layer: Callable[[int], int]) -> int:
        return tape.add(x, tape.dropout(layer(tape.layer_norm(x, width))))

    x = embedded()
    for _ in range(layers):
        x = wrapped(wrapped(x, lambda y: attention(y, y)), feed)
    memory = tape.layer_norm(x, width)
    x = embedded()
    for _ in range(layers):
        x = wrapped(x, lambda y: attention(y, y))
        x = wrapped(wrapped(x, lambda y: attention(y, memory)), feed)
    logits = tape.dense(tape.layer_norm(x, width), width, vocabulary, shared="embedding")
    labels = tape.op("one_hot", [tape.data(tokens)], tokens * vocabulary)
    padded = tape.each("pad", logits)  # to the length of the labels
    loss = tape.cross_entropy(tape.each("reshape", padded), tape.each("reshape", labels))
    return tape.train(loss, f"Transformer {'big' if big else 'base'}, {layers} + {layers} layers")
