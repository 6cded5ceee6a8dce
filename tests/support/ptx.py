"""Runs PTX on a CPU: one block of threads in lockstep, in numpy, with what makes asynchronous code wrong made visible.

It knows the instructions that the Ampere kernel is compiled to, and refuses others. Memory is checked as well as
computed with:

- `cp.async` copies nothing before the wait for its group; who reads or writes there until then has raced with it.
- What one warp writes to shared memory, another may touch only after a barrier, and the other way round.
- Every address must lie in the array that its pointer came from. Shared memory starts as NaN.

Threads must branch together, as those of the kernel do. Functions that the card approximates (exp2, log2, tanh,
reciprocals) are exact here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

THREADS, LANES = 128, 32
WARP, LANE = np.arange(THREADS) // LANES, np.arange(THREADS) % LANES
_ARRAY = 40  # bits of an offset; above them is the number of an array
_HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


class Memory:
    """Shared memory of a block, and arrays in device memory, which are read and written in place."""

    def __init__(self, arrays: Sequence[np.ndarray], shared_bytes: int):
        self.arrays = [array.reshape(-1).view(np.uint8) for array in arrays]
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.pending = np.zeros(shared_bytes, bool)  # a copy is on its way
        self.epoch = 1  # barriers seen
        self.written = np.zeros((4, shared_bytes), np.int32)  # in which epoch each warp last did
        self.read = np.zeros((4, shared_bytes), np.int32)
        self.open: list[tuple[np.ndarray, np.ndarray]] = []
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def load(self, address, size, shared=False):
        """`[threads, size]` bytes."""
        if shared:
            at = self._touch(address, size, self.written)
            self.read[WARP[:, None], at] = self.epoch
            return self.shared[at]
        array, at = self._find(address, size)
        return array[at]

    def store(self, address, data, shared=False):
        if shared:
            at = self._touch(address, data.shape[1], self.written, self.read)
            self.written[WARP[:, None], at] = self.epoch
            self.shared[at] = data
        else:
            array, at = self._find(address, data.shape[1])
            array[at] = data

    def copy(self, target, source, size):
        at = self._touch(target, size, self.written, self.read)
        self.pending[at] = True
        self.open.append((at, source))

    def commit(self):
        self.groups.append(self.open)
        self.open = []

    def wait(self, allowed: int):
        done = len(self.groups) - allowed
        for group in self.groups[: max(done, 0)]:
            for at, source in group:
                self.pending[at] = False
                self.written[WARP[:, None], at] = self.epoch
                self.shared[at] = self.load(source, at.shape[1])
        self.groups = self.groups[max(done, 0) :]

    def barrier(self):
        self.epoch += 1

    def _find(self, address, size):
        number = int(address[0] >> _ARRAY) - 1
        offset = (address & ((1 << _ARRAY) - 1)).astype(np.int64)
        if (address >> _ARRAY != number + 1).any() or offset.max() + size > self.arrays[number].size:
            raise IndexError(f"outside of array {number}")
        return self.arrays[number], offset[:, None] + np.arange(size)

    def _touch(self, address, size, *by_others):
        at = address.astype(np.int64)[:, None] + np.arange(size)
        if at.min() < 0 or at.max() >= self.shared.size:
            raise IndexError("outside of shared memory")
        if self.pending[at].any():
            raise RuntimeError("a race with a copy that is not waited for")
        for times in by_others:
            for warp in range(4):
                if (times[warp][at[warp != WARP]] == self.epoch).any():
                    raise RuntimeError("a race of two warps")
        return at


def _floats(register):
    return register.view(np.float32)


def _bits(values):
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _pairs(registers, dtype):
    """`[threads]` of 32 bits each to `[threads, registers, 2]` float32."""
    return np.stack(registers, 1).view(dtype).reshape(THREADS, -1, 2).astype(np.float32)


def mma(a, b, c, dtype):
    """m16n8k16, by the tables of the PTX manual: registers of a, b and c to those of `a @ b + c`."""
    left, right = np.zeros((4, 16, 16), np.float32), np.zeros((4, 16, 8), np.float32)
    total = np.zeros((4, 16, 8), np.float32)
    row, pair = LANE // 4, 2 * (LANE % 4)
    for n, values in enumerate(_pairs(a, dtype).swapaxes(0, 1)):
        for half in range(2):
            left[WARP, row + 8 * (n % 2), pair + half + 8 * (n // 2)] = values[:, half]
    for n, values in enumerate(_pairs(b, dtype).swapaxes(0, 1)):
        for half in range(2):
            right[WARP, pair + half + 8 * n, row] = values[:, half]
    places = [(WARP, row + 8 * (n // 2), pair + n % 2) for n in range(4)]
    for place, register in zip(places, c, strict=True):
        total[place] = _floats(register)
    with np.errstate(invalid="ignore", over="ignore"):
        total += left @ right
    return [_bits(total[place]) for place in places]


def ldmatrix(memory, address, count, transposed):
    """Matrix `n` has the rows that lanes `8 n` and after point at; lane `l` gets the elements `2 (l % 4)` and the next
    of row `l / 4`, or of that column."""
    row, pair = LANE // 4, 2 * (LANE % 4)

    def halves(lane, column, size):
        return memory.load(address[WARP * LANES + lane] + (2 * column).astype(np.uint64), size, shared=True)

    for n in range(count):
        if transposed:
            found = np.concatenate([halves(8 * n + pair + half, row, 2) for half in range(2)], axis=1)
        else:
            found = halves(8 * n + row, pair, 4)
        yield np.ascontiguousarray(found).view(np.uint32)[:, 0]


def _pack(high, low, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        both = np.stack([_floats(low), _floats(high)], 1).astype(dtype)
    return both.view(np.uint32)[:, 0]


def _high(a, b):
    """The upper half of products."""
    bits = 8 * a.itemsize
    return np.array([(int(x) * int(y) >> bits) % (1 << bits) for x, y in zip(a, b, strict=True)], f"u{a.itemsize}")


def _signed(register):
    return register.view({2: np.int16, 4: np.int32, 8: np.int64}[register.itemsize])


_BINARY = {
    "add": "{a} + {b}", "sub": "{a} - {b}", "mul": "{a} * {b}",
    "and": "{a} & {b}", "or": "{a} | {b}", "xor": "{a} ^ {b}",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {"ex2": "np.exp2", "lg2": "np.log2", "rcp": "np.reciprocal", "tanh": "np.tanh"}


class Program:
    """A kernel's PTX as Python, a code object for each stretch without branches."""

    def __init__(self, text: str):
        self.entry = re.search(r"\.entry (\w+)\(", text)[1]
        body = text[text.index("{", text.index(".minnctapersm")) + 1 :]
        body = re.sub(r"//.*", "", body)
        statements = [s.strip() for s in re.split(r";|(?<=:)\n", body)]
        self.blocks: list[tuple[Any, tuple[str, ...]]] = []
        self.labels: dict[str, int] = {}
        lines: list[str] = []

        def close(*jump: str):
            self.blocks.append((compile("\n".join(lines), f"<ptx {len(self.blocks)}>", "exec"), jump))
            lines.clear()

        for statement in statements:
            statement = " ".join(line for line in statement.splitlines() if not line.strip().startswith("."))
            statement = " ".join(statement.split())
            if statement.endswith(":"):
                close()
                self.labels[statement[:-1]] = len(self.blocks)
            elif match := re.match(r"(?:@(!?)%(p\d+) )?bra(?:\.uni)? (\S+)$", statement):
                close(match[3], *([match[2], match[1]] if match[2] else []))
            elif statement == "ret":
                close("ret")
            elif statement and statement != "}":
                lines.append(self._line(statement))
        close("ret")

    def run(self, arrays: Sequence[np.ndarray], grid: Sequence[int], shared_bytes: int) -> None:
        """`arrays`: the arguments, as the kernel takes them. `grid`: of x, y and z."""
        for z, y, x in np.ndindex(*grid[::-1]):
            memory = Memory(arrays, shared_bytes)
            names = {
                "np": np, "m": memory, "F": _floats, "B": _bits, "S": _signed, "mma": mma, "ldmatrix": ldmatrix,
                "pack": _pack, "high": _high, "lanes": LANE, "warps": WARP, "halves": _HALVES,
                "special": {"tid.x": np.arange(THREADS, dtype=np.uint32)}
                | {f"ctaid.{n}": np.full(THREADS, v, np.uint32) for n, v in zip("xyz", (x, y, z), strict=True)},
                "params": [np.full(THREADS, (n + 1) << _ARRAY, np.uint64) for n in range(len(arrays))],
            }  # fmt: skip
            at = 0
            while True:
                code, jump = self.blocks[at]
                with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                    exec(code, names)
                at += 1
                if jump == ("ret",):
                    break
                if len(jump) == 3:
                    taken = names[jump[1]] ^ (jump[2] == "!")
                    if taken.any() != taken.all():
                        raise RuntimeError("threads do not branch together")
                    at = self.labels[jump[0]] if taken.all() else at
                elif jump:
                    at = self.labels[jump[0]]
            if memory.open or any(group for group in memory.groups):
                raise RuntimeError("a copy is not waited for")

    def _line(self, statement: str) -> str:
        """One instruction as Python; registers are variables."""
        name, _, rest = statement.partition(" ")
        kind = name.split(".")
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
        bits = next((int(k[1:]) for k in reversed(kind) if re.fullmatch(r"[bsuf]\d+", k)), 32)
        target = self._names(operands[0]) if operands else []

        def value(n, width=bits):
            return self._value(operands[n], width)

        def signed(n):
            return f"S({value(n)})" if kind[-1].startswith("s") else value(n)

        def assigned(expression):
            return f"{', '.join(target)} = {expression}"

        match kind:
            case ["ld", "param::entry", *_]:
                number = re.search(r"param_(\d+)", rest)[1]
                return assigned(f"params[{number}]")
            case ["cvta", *_]:
                return assigned(value(1))
            case ["mov", *_] if operands[1].startswith("{"):
                low, high = self._names(operands[1])
                return assigned(f"np.stack([{low}, {high}], 1).view(np.uint{bits})[:, 0]")
            case ["mov", *_] if operands[0].startswith("{"):
                return assigned(f"{value(1)}.reshape(-1, 1).view(np.uint{bits // 2}).T.copy()")
            case ["mov", *_]:
                return assigned(value(1))
            case ["ld" | "st", *spaces, _]:
                count = next((int(s[1:]) for s in spaces if re.fullmatch(r"v\d", s)), 1)
                shared, size = "shared" in spaces, bits // 8 * count
                if kind[0] == "ld":
                    data = f"np.ascontiguousarray(m.load({self._address(operands[1])}, {size}, {shared}))"
                    held = 64 if target[0].startswith("rd") else bits
                    return f"{', '.join(target)}, = {data}.view(np.uint{bits}).T.astype(np.uint{held})"
                registers = ", ".join(self._value(r, bits) for r in self._parts(operands[1]))
                return f"m.store({self._address(operands[0])}, np.stack([{registers}], 1).view(np.uint8), {shared})"
            case ["cp", "async", "cg", *_]:
                return f"m.copy({self._address(operands[0])}, {self._address(operands[1])}, {operands[2]})"
            case ["cp", "async", "commit_group"]:
                return "m.commit()"
            case ["cp", "async", "wait_group"]:
                return f"m.wait({operands[0]})"
            case ["bar", "sync"]:
                return "m.barrier()"
            case ["ldmatrix", *_]:
                return assigned(f"ldmatrix(m, {self._address(operands[1])}, {len(target)}, {'trans' in kind})")
            case ["mma", *_, _, half, _, _]:
                a, b, c = ([self._value(r, 32) for r in self._parts(o)] for o in operands[1:])
                lists = ", ".join(f"[{', '.join(registers)}]" for registers in (a, b, c))
                return assigned(f"mma({lists}, halves['{half}'])")
            case ["shfl", "sync", "bfly", _]:
                return assigned(f"{value(1)}[warps * 32 + (lanes ^ {operands[2]})]")
            case ["cvt", "rn", pair, "f32"] if pair.endswith("x2"):
                return assigned(f"pack({value(1)}, {value(2)}, halves['{pair[:-2]}'])")
            case ["cvt", to, source]:
                raw = self._value(operands[1], int(source[1:]))
                raw = f"S({raw})" if source[0] == "s" else raw  # so that it is extended by its sign
                return assigned(f"{raw}.astype(np.uint{to[1:]})")
            case ["setp", how, _]:
                a, b = (f"F({value(n)})" if kind[-1] == "f32" else signed(n) for n in (1, 2))
                return assigned(f"{a} {_COMPARE[how]} {b}")
            case ["selp", *_]:
                return assigned(f"np.where({operands[3][1:]}, {value(1)}, {value(2)})")
            case [("and" | "or" | "xor") as how, "pred"]:
                a, b = (o[1:] for o in operands[1:])
                return assigned(_BINARY[how].format(a=a, b=b))
            case ["not", "pred"]:
                return assigned(f"~{operands[1][1:]}")
            case ["max", "NaN", "f32"]:
                return assigned(f"B(np.maximum(F({value(1)}), F({value(2)})))")
            case [("add" | "sub" | "mul") as how, *_, "f32"]:
                return assigned(f"B({_BINARY[how].format(a=f'F({value(1)})', b=f'F({value(2)})')})")
            case ["fma", "rn", "f32"]:
                return assigned(f"B(F({value(1)}) * F({value(2)}) + F({value(3)}))")
            case [("ex2" | "lg2" | "rcp" | "tanh") as how, *_, "f32"]:
                return assigned(f"B({_UNARY[how]}(F({value(1)})))")
            case ["neg", "f32"]:
                return assigned(f"B(-F({value(1)}))")
            case ["mul", "wide", kind_of]:
                wide = "np.int64" if kind_of[0] == "s" else "np.uint64"
                a, b = (f"{signed(n)}.astype({wide})" for n in (1, 2))
                return assigned(f"({a} * {b}).view(np.uint64)")
            case ["mul", "hi", _]:
                return assigned(f"high({signed(1)}, {signed(2)})")
            case ["mad", "lo", _]:
                return assigned(f"{value(1)} * {value(2)} + {value(3)}")
            case ["shl", _]:
                return assigned(f"{value(1)} << {self._value(operands[2], 32)}.astype(np.uint{bits})")
            case ["shr", _]:
                return assigned(
                    f"({signed(1)} >> {self._value(operands[2], 32)}.astype({signed(1)}.dtype)).view(np.uint{bits})"
                )
            case [("min" | "max") as how, _]:
                return assigned(f"np.{how}imum({signed(1)}, {signed(2)}).view(np.uint{bits})")
            case [("add" | "sub" | "and" | "or" | "xor") as how, _] | ["mul" as how, "lo", _]:
                return assigned(_BINARY[how].format(a=value(1), b=value(2)))
        raise NotImplementedError(statement)

    def _parts(self, operand: str) -> list[str]:
        return [part.strip() for part in operand.strip("{}").split(",")]

    def _names(self, operand: str) -> list[str]:
        return [part.lstrip("%") for part in self._parts(operand)]

    def _value(self, operand: str, bits: int) -> str:
        """A register, or a constant in the form of one."""
        if operand.startswith("%"):
            name = operand[1:]
            return f"special['{name}']" if "." in name else name
        if operand.startswith("__dynamic_shmem__"):
            number = 0
        else:
            number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return f"np.full({THREADS}, {number % (1 << bits)}, np.uint{bits})"

    def _address(self, operand: str) -> str:
        base, _, offset = operand.strip("[]").partition("+")
        return f"{self._value(base, 64)} + np.uint64({int(offset or 0) % (1 << 64)})"


def programs(dump: Path) -> Iterable[tuple[Program, int]]:
    """What Mosaic wrote to MOSAIC_GPU_DUMP_TO, in order: kernels, and bytes of shared memory that each asks for."""
    for number in range(len(list(dump.glob("*.ptx")))):
        resources = (dump / f"kernel_{number}.resources.txt").read_text()
        yield (
            Program((dump / f"kernel_{number}.ptx").read_text()),
            int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]),
        )
