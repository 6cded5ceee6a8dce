"""Functions that numba compiled, as operations of an XLA program on a CPU, run by all of XLA's threads.

XLA calls a C function with the address of a call frame (`xla/ffi/api/c_api.h`, shipped with jaxlib; its layout is an
ABI that XLA keeps). What is read of it, counted in words of 8 bytes:

    XLA_FFI_CallFrame   1 extension, 2 api, 3 context, 9 addresses of argument buffers, 14 of result buffers,
                        20 of attributes, in the order of their names
    XLA_FFI_Buffer      3 data, 5 dimensions
    XLA_FFI_Scalar      1 address of the value
    XLA_FFI_Api         8 Error_Destroy, 17 ThreadPool_Schedule, 18 ThreadPool_NumThreads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from pallas_kernels.cpu.native import target_machine
from pallas_kernels.cpu.simd import compiled, fetch_add, load_word, operation, store_word
from pallas_kernels.cpu.units import WORD

#: The oldest minor version (of major 0) that has what is used here. XLA refuses handlers that are too old for it.
_API_MINOR = 1
_ERROR_DESTROY, _SCHEDULE, _NUM_THREADS = 8 * WORD, 17 * WORD, 18 * WORD
#: Where in the call frame's extension the version is to be written, when XLA asks for it instead of calling.
_METADATA, _VERSION = 3 * WORD, 3 * WORD

_WORD_TYPE = ir.IntType(64)

_malloc: Any = types.ExternalFunction("malloc", types.intp(types.intp))
_free: Any = types.ExternalFunction("free", types.void(types.intp))
_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@operation(types.intp, types.intp, types.intp)
def _call(builder, function, word):
    """(function, word) -> what the C function at that address returns."""
    of_type = ir.FunctionType(_WORD_TYPE, [_WORD_TYPE])
    return builder.call(builder.inttoptr(function, of_type.as_pointer()), [word])


def _word(builder, address, index):
    """Emits a load of word number `index`, a Python int or a value, from `address`."""
    index = ir.Constant(_WORD_TYPE, index) if isinstance(index, int) else index
    at = builder.add(address, builder.mul(index, ir.Constant(_WORD_TYPE, WORD)))
    return builder.load(builder.inttoptr(at, _WORD_TYPE.as_pointer()))


@operation(types.intp, types.intp, types.intp)
def argument(builder, frame, index):
    """(frame, index) -> the address of the buffer that argument number `index` of the operation is."""
    return _word(builder, _word(builder, frame, 9), index)


@operation(types.intp, types.intp, types.intp)
def result(builder, frame, index):
    """(frame, index) -> the address of the buffer that result number `index` of the operation is."""
    return _word(builder, _word(builder, frame, 14), index)


@operation(types.intp, types.intp, types.intp)
def attribute(builder, frame, index):
    """(frame, index) -> the address of the value of a scalar attribute, by its place in the order of names."""
    return _word(builder, _word(builder, _word(builder, frame, 20), index), 1)


@operation(types.intp, types.intp)
def data(builder, buffer):
    """(buffer) -> the address of its first element."""
    return _word(builder, buffer, 3)


@operation(types.intp, types.intp, types.intp)
def dimension(builder, buffer, index):
    """(buffer, index) -> its size along dimension number `index`."""
    return _word(builder, _word(builder, buffer, 5), index)


# What the threads that share one call have in common, in words. It outlives the call: XLA may come to start a thread
# when all is done.
_NEXT, _FINISHED, _HOLDERS, _UNITS, _FRAME, _WORKERS = (i * WORD for i in range(6))
_SCRATCH = 6 * WORD  # arguments for XLA's functions
_BYTES = 12 * WORD


def object_file(name: str, units: Callable, run: Callable) -> bytes:
    """The code of an operation for `pallas_kernels.cpu.native.register`, of functions that numba compiles.

    Its units of work are taken in turn by the thread that XLA calls and by others of XLA's pool, while there are any;
    which thread takes which is not determined. At most as many work as the operation's last result has rows: that
    result is their memory, a row each.

    Args:
        name: of the operation, and of the one function that the object file offers.
        units: (frame) -> how many units of work the call has.
        run: (frame, unit, worker) does one, in the memory of row `worker`, and returns 0; in Python, not compiled yet.
    """

    @compiled
    def leave(shared):
        if fetch_add(shared + _HOLDERS, -1) == 1:
            _free(shared)

    # C functions call each other by names: numba would optimise all of `run` once more for each that calls it.
    functions: dict[str, Any] = {}

    def c_function(suffix: str, signature: Any) -> Callable:
        def decorate(function: Callable) -> Any:
            symbol = f"{name}{suffix}"
            functions[symbol] = made = cfunc(signature, error_model="numpy")(function)
            llvm.add_symbol(symbol, made.address)
            return types.ExternalFunction(symbol, signature)

        return decorate

    run_unit = c_function("_run", types.intp(types.intp, types.intp, types.intp))(run)

    @c_function("_work", types.intp(types.intp))
    def work(shared):
        worker = fetch_add(shared + _WORKERS, 1)
        while True:
            unit = fetch_add(shared + _NEXT, 1)
            if unit >= load_word(shared + _UNITS):  # and the frame may be gone
                return 0
            run_unit(load_word(shared + _FRAME), unit, worker)
            fetch_add(shared + _FINISHED, 1)

    @c_function("_help", types.void(types.intp))
    def help_out(shared):
        work(shared)
        leave(shared)

    @operation(types.intp)
    def address_of_help(builder):
        of_type = ir.FunctionType(ir.VoidType(), [_WORD_TYPE])
        return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, of_type, f"{name}_help"), _WORD_TYPE)

    @compiled
    def ask_for_help(frame, shared, count):
        """Has up to `count` helpers started, and no more than XLA has threads beside this one."""
        api, arguments = load_word(frame + 2 * WORD), shared + _SCRATCH
        threads = arguments + 5 * WORD
        # A structure for each function: its size, an extension, and for the first two XLA's context.
        store_word(arguments, 4 * WORD)
        store_word(arguments + WORD, 0)
        store_word(arguments + 2 * WORD, load_word(frame + 3 * WORD))
        store_word(arguments + 3 * WORD, threads)
        store_word(threads, 1)
        error = _call(load_word(api + _NUM_THREADS), arguments)
        count = min(count, load_word(threads) - 1)
        store_word(arguments, 5 * WORD)
        store_word(arguments + 3 * WORD, address_of_help())
        store_word(arguments + 4 * WORD, shared)
        while error == 0 and count > 0:
            fetch_add(shared + _HOLDERS, 1)
            error = _call(load_word(api + _SCHEDULE), arguments)
            if error != 0:
                fetch_add(shared + _HOLDERS, -1)
            count -= 1
        if error != 0:  # there is no pool: this thread does it all
            store_word(arguments, 3 * WORD)
            store_word(arguments + 2 * WORD, error)
            _call(load_word(api + _ERROR_DESTROY), arguments)

    @c_function("", types.intp(types.intp))
    def handler(frame):
        extension = load_word(frame + WORD)
        if extension != 0:
            store_word(load_word(extension + _METADATA) + _VERSION, _API_MINOR << 32)
            return 0
        count = units(frame)
        if count == 0:
            return 0
        shared = _malloc(_BYTES)
        store_word(shared + _NEXT, 0)
        store_word(shared + _FINISHED, 0)
        store_word(shared + _HOLDERS, 1)
        store_word(shared + _UNITS, count)
        store_word(shared + _FRAME, frame)
        store_word(shared + _WORKERS, 0)
        memory = result(frame, load_word(frame + 12 * WORD) - 1)
        ask_for_help(frame, shared, min(count, dimension(memory, 0)) - 1)
        work(shared)
        while fetch_add(shared + _FINISHED, 0) < count:
            _yield()
        leave(shared)
        return 0

    return _in_one(name, functions)


def _in_one(name: str, functions: dict[str, Any]) -> bytes:
    """One object file of C functions that numba compiled, each by its symbol; it offers `name` alone.

    As nothing else can be called from outside, LLVM sees that none of them raises, and drops what would need numba.
    """
    modules = []
    for symbol, function in functions.items():
        modules.append(llvm.parse_assembly(function.inspect_llvm().replace(function.native_name, symbol)))
    module = modules.pop()
    for other in modules:
        module.link_in(other)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = llvm.Linkage.internal
    machine = target_machine()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    if foreign := sorted(f.name for f in module.functions if f.is_declaration and not _known(f.name)):
        raise RuntimeError(
            f"the code of {name} calls what it has not: {foreign}; numba made another form of code than before"
        )
    return machine.emit_object(module)


def _known(symbol: str) -> bool:
    """Whether a function is of the C library, or LLVM's own."""
    return symbol in ("malloc", "free", "sched_yield", "expf", "tanhf") or symbol.startswith("llvm.")
