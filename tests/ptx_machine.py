"""Runs the PTX of small kernels of jflux.symm on the host, all ranks at once, thread by thread.

It has the instructions that Triton makes of those kernels, and no others. Threads take turns in a
random order, and so do blocks and ranks; memory is sequentially consistent. So it shows whether
addresses, epochs, signals, waits and fault records are right, and not whether fences suffice. Two
instructions of one thread may have any other thread's in between.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

MASK = (1 << 64) - 1
FIRST = 1 << 16  # address


class Memory:
    """One address space, of all ranks."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.top = FIRST

    def allocate(self, size: int, fill: int = 0) -> int:
        address = -(-self.top // 1024) * 1024
        self.top = address + size
        assert self.top <= len(self.data)
        self.data[address : self.top] = bytes([fill]) * size
        return address

    def _check(self, address: int, size: int) -> None:
        assert FIRST <= address <= self.top - size, f"no memory at {address:#x}"
        assert address % size == 0, f"{address:#x} is no multiple of {size}"

    def read(self, address: int, size: int = 8) -> int:
        self._check(address, size)
        return int.from_bytes(self.data[address : address + size], "little")

    def write(self, address: int, value: int, size: int = 8) -> None:
        self._check(address, size)
        self.data[address : address + size] = _cut(value, 8 * size).to_bytes(size, "little")


def _cut(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


def _signed(value: int, bits: int) -> int:
    value = _cut(value, bits)
    return value - (1 << bits) if value >> (bits - 1) else value


def _float(bits: int) -> Any:
    return np.frombuffer(struct.pack("<I", _cut(bits, 32)), np.float32)[0]


def _bits(value: Any, kind: Any = np.float32) -> int:
    return int.from_bytes(np.asarray(value, kind).tobytes(), "little")


class Program:
    """A kernel's instructions: (predicate or None, whether it is negated, opcode, operands)."""

    def __init__(self, ptx: str) -> None:
        text = ptx[ptx.index(".visible .entry") :]
        head, text = text.split(")", 1)
        self.parameters = re.findall(r"\w+_param_\d+", head)
        lines = (line.split("//")[0].strip() for line in text.splitlines())
        text = "\n".join(line for line in lines if not line.startswith((".loc", ".pragma")))
        self.labels: dict[str, int] = {}
        self.instructions: list[tuple[str | None, bool, str, list[str]]] = []
        self._parse(text[text.index("{") :])

    def _parse(self, text: str) -> None:
        """Braces at the beginning of a statement are a scope, with registers and labels of its own
        (inline PTX); others belong to operands."""
        scopes: list[dict[str, str]] = []
        current, statements = "", 0
        for at, c in enumerate(text):
            blank = not current.strip()
            if c == "{" and blank:
                scopes.append({"": f"@{at}"} if scopes else {"": ""})
            elif c == "}" and blank:
                scopes.pop()
                if not scopes:
                    return
            elif c == ":" and re.fullmatch(r"\s*[$\w]+", current) and text[at + 1] != ":":
                self.labels[current.strip() + scopes[-1][""]] = len(self.instructions)
                current = ""
            elif c == ";":
                self._add(" ".join(current.split()), scopes[-1], statements)
                current, statements = "", statements + 1
            else:
                current += c

    def _add(self, statement: str, scope: dict[str, str], number: int) -> None:
        if declared := re.match(r"\.reg \.\w+ (.*)", statement):
            if scope[""]:
                names = (name.strip() for name in declared.group(1).split(","))
                scope.update({name: f"{name}@{number}" for name in names})
            return
        if statement.startswith("."):
            return
        statement = re.sub(
            r"[A-Za-z_]\w*(?![\w.:])", lambda m: scope.get(m.group(), m.group()), statement
        )
        found = re.match(r"(?:@(!?)(\S+) )?([\w.:]+)\s*(.*)$", statement)
        assert found is not None, statement
        negated, predicate, opcode, rest = found.groups()
        operands = [o.strip() for o in re.split(r",(?![^{]*\})", rest) if o.strip()]
        if opcode.startswith("bra"):
            operands[0] += "" if operands[0].startswith("$") else scope[""]
        self.instructions.append((predicate, negated == "!", opcode, operands))


class Trap(Exception):
    """A thread has trapped."""


class Block:
    """A CTA."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[int],
        memory: Memory,
        clock: list[int],
        *,
        blocks: int,
        threads: int,
        shared_bytes: int,
    ) -> None:
        assert len(arguments) == len(program.parameters)
        self.program, self.memory, self.clock = program, memory, clock
        self.parameters = dict(zip(program.parameters, arguments, strict=True))
        self.shared = bytearray(shared_bytes)
        self.special = {"%nctaid.x": blocks, "global_smem": 0}
        self.threads = [self._run(thread) for thread in range(threads)]
        self.waiting: list[Any] = [None] * threads  # what a thread waits for
        self.sent: list[Any] = [None] * threads
        self.alive = threads

    def step(self, rng: random.Random) -> bool:
        """Some instructions of each thread that need not wait; whether any is left."""
        order = list(range(len(self.threads)))
        rng.shuffle(order)
        for thread in order:
            if self.waiting[thread] is not None:
                continue
            try:
                self.waiting[thread] = self.threads[thread].send(self.sent[thread])
            except StopIteration:
                self.waiting[thread] = ("ended",)
                self.alive -= 1
            self.sent[thread] = None
        kinds = [None if w is None else w[0] for w in self.waiting]
        if all(kind == "bar" for kind in kinds):
            self.waiting = [None] * len(kinds)
        for first in range(0, len(kinds), 32):
            warp = slice(first, first + 32)
            for kind, combine in (("redux", min), ("shfl", list)):
                if all(k == kind for k in kinds[warp]):
                    result = combine(w[1] for w in self.waiting[warp])
                    self.sent[warp] = [result] * 32
                    self.waiting[warp] = [None] * 32
        return self.alive > 0

    def _run(self, thread: int) -> Generator[Any, Any, None]:
        """One thread; yields what it waits for, or None where others may take their turn."""
        registers: dict[str, Any] = {"%tid.x": thread, **self.special}
        at = count = 0

        def value(name: str) -> Any:
            name = name.strip("{} ")
            if name in registers:
                return registers[name]
            if name == "%globaltimer":
                return self.clock[0]
            if name.startswith("%"):  # nobody has set it: a predicate was false
                return 0x5A5A5A5A5A5A5A5A
            return int(name[2:], 16) if name.startswith("0f") else int(name, 0)

        def names(vector: str) -> list[str]:
            return [name.strip() for name in vector.strip("{} ").split(",")]

        def address(place: str) -> int:
            found = re.match(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+)\s*)?\]$", place)
            assert found is not None, place
            return (value(found.group(1)) + int(found.group(2) or 0)) & MASK

        def read(address: int, size: int, parts: list[str]) -> int:
            if "shared" in parts:
                return int.from_bytes(self.shared[address : address + size], "little")
            return self.memory.read(address, size)

        def write(address: int, data: int, size: int, parts: list[str]) -> None:
            if "shared" in parts:
                data = _cut(data, 8 * size)
                self.shared[address : address + size] = data.to_bytes(size, "little")
            else:
                self.memory.write(address, data, size)

        while True:
            predicate, negated, opcode, operands = self.program.instructions[at]
            at, count = at + 1, count + 1
            self.clock[0] += 1
            if count % 40 == 0:
                yield None
            if predicate is not None and bool(registers[predicate]) == negated:
                continue
            base, *parts = opcode.split(".")
            bits = int(re.sub(r"\D", "", parts[-1]) or 1) if parts else 0
            match base:
                case "bra":
                    at = self.program.labels[operands[0]]
                case "ret":
                    return
                case "trap":
                    raise Trap
                case "fence":
                    pass
                case "nanosleep":
                    slept = value(operands[0])
                    self.clock[0] += slept * (1000 if slept >= 1000 else 1)  # before a trap
                    yield None
                case "bar":
                    yield ("bar",)
                case "redux":
                    least = yield ("redux", _signed(value(operands[1]), 32))
                    registers[operands[0]] = _cut(least, 32)
                case "shfl":
                    of_warp = yield ("shfl", value(operands[1]))
                    registers[operands[0]] = of_warp[thread % 32 ^ value(operands[2])]
                case "ld" if "param" in parts:
                    registers[operands[0]] = self.parameters[operands[1].strip("[]")]
                case "ld":
                    for i, name in enumerate(names(operands[0])):
                        place = address(operands[1]) + i * bits // 8
                        registers[name] = read(place, bits // 8, parts)
                case "st":
                    for i, name in enumerate(names(operands[1])):
                        place = address(operands[0]) + i * bits // 8
                        write(place, value(name), bits // 8, parts)
                    yield None
                case "atom":
                    place, given = address(operands[1]), [value(o) for o in operands[2:]]
                    old = self.memory.read(place)
                    if "add" in parts:
                        self.memory.write(place, old + given[0])
                    elif "exch" in parts:
                        self.memory.write(place, given[0])
                    elif old == given[0]:  # cas
                        self.memory.write(place, given[1])
                    registers[operands[0]] = old
                    yield None
                case "red":
                    place, given_ = address(operands[0]), value(operands[1])
                    old = self.memory.read(place)
                    self.memory.write(place, max(old, given_) if "max" in parts else old + given_)
                    yield None
                case "mov" if operands[0].startswith("{"):
                    parts_ = names(operands[0])
                    width = bits // len(parts_)
                    for i, name in enumerate(parts_):
                        registers[name] = _cut(value(operands[1]) >> (width * i), width)
                case "mov" if operands[1].startswith("{") and "," in operands[1]:
                    parts_ = names(operands[1])
                    width = bits // len(parts_)
                    registers[operands[0]] = sum(
                        _cut(value(name), width) << (width * i) for i, name in enumerate(parts_)
                    )
                case _:
                    given = [value(o) for o in operands[1:]]
                    registers[operands[0]] = _compute(base, parts, bits, given)


def _compute(base: str, parts: list[str], bits: int, given: list[Any]) -> Any:
    """What needs no memory."""
    kind = parts[-1]

    def number(value: int) -> int:
        return _signed(value, bits) if kind[0] == "s" else _cut(value, bits)

    if base == "setp":
        x, y = number(given[0]), number(given[1])
        holds = {
            "eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y,
        }[parts[0]]  # fmt: skip
        return holds and (parts[1] != "and" or bool(given[2]))
    if base == "selp":
        return _cut(given[0] if given[2] else given[1], bits)
    if base == "cvt":
        return _convert(parts[-2], kind, given)
    if base == "mov" and kind == "pred":
        return given[0] != 0
    if base == "mov":
        return _cut(given[0], bits)
    if kind == "pred":
        return {
            "and": lambda: given[0] and given[1],
            "or": lambda: given[0] or given[1],
            "not": lambda: not given[0],
        }[base]()
    if kind == "f32":
        x = [_float(value) for value in given]
        with np.errstate(all="ignore"):
            return _bits({"add": lambda: x[0] + x[1], "div": lambda: x[0] / x[1]}[base]())
    if base in ("mul", "mad"):
        product = number(given[0]) * number(given[1])
        product = product >> bits if "hi" in parts else product
        total = product + (given[2] if base == "mad" else 0)
        return _cut(total, 2 * bits if "wide" in parts else bits)
    if base == "bfe":
        return _cut(given[0] >> given[1], given[2])
    result = {
        "add": lambda: given[0] + given[1],
        "sub": lambda: given[0] - given[1],
        "and": lambda: given[0] & given[1],
        "or": lambda: given[0] | given[1],
        "xor": lambda: given[0] ^ given[1],
        "not": lambda: ~given[0],
        "neg": lambda: -given[0],
        "shl": lambda: given[0] << given[1],
        "shr": lambda: number(given[0]) >> given[1],
        "rem": lambda: number(given[0]) % number(given[1]),
        "min": lambda: min(number(given[0]), number(given[1])),
    }[base]()
    return _cut(result, bits)


def _convert(to: str, of: str, given: list[Any]) -> int:
    if of == "f16":
        half = np.frombuffer(struct.pack("<H", given[0]), np.float16)[0]
        return _bits(half)
    if to == "f16":
        return _bits(_float(given[0]), np.float16)
    if to == "f16x2":  # the first operand is the upper half
        upper, lower = (_bits(_float(value), np.float16) for value in given)
        return upper << 16 | lower
    bits = int(of[1:])
    value = _signed(given[0], bits) if of[0] == "s" else _cut(given[0], bits)
    return _cut(value, int(to[1:]))
