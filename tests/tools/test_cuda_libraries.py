"""Libraries that nvcc would make: launches, copies and errors of one whose kernel is written down as PTX in a fat binary."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tools.ptx.cuda_libraries import CudaRuntime, Work, ptx_of
from tools.ptx.executor import KernelFault
from tools.ptx.memory import DeviceMemory
from tools.ptx.program import Allowed, PtxError, read_kernel

_PTX = """
.version 9.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 room[];
.visible .entry other(.param .u64 at)
{
{
.reg .b32 a; mov.b32 a, 1;
}
.loc 1 2 3
ret;
}
.visible .entry add(.param .align 8 .b8 given[16])
.maxntid 32, 1, 1
{
.reg .b64 %rd<4>; .reg .b32 %r<4>;
ld.param.u64 %rd1, [given]; ld.param.u32 %r1, [given+8]; mov.u32 %r2, %tid.x; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2;
ld.global.u32 %r3, [%rd3]; add.s32 %r3, %r3, %r1; st.global.u32 [%rd3], %r3;
ret;
}
"""
_LIBRARY = """
#include <cstdint>
#include <cstring>
#include <vector>
struct Size3 { unsigned x, y, z; };
extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*);
int cudaLaunchKernel(const void*, Size3, Size3, void**, size_t, void*);
int cudaMemcpyAsync(void*, const void*, size_t, int, void*);
int cudaMemsetAsync(void*, int, size_t, void*);
int cudaFuncSetAttribute(const void*, int, int);
int cudaGetLastError();
}
static const char text[] = R"ptx(PTX)ptx";
static char stub, strange;
static std::vector<char> image;
static struct { int magic, version; const void* data; void* rest; } wrapper = {0x466243b1, 1, nullptr, nullptr};
template <class T> static void put(T number) { image.insert(image.end(), (char*)&number, (char*)&number + sizeof number); }
static int loaded = [] {
  put(0xBA55ED50u), put(uint16_t(1)), put(uint16_t(16)), put(uint64_t(2 * 24 + 8 + sizeof text));
  put(uint16_t(2)), put(uint16_t(0)), put(24u), put(uint64_t(8)), put(0u), put(0u), put(uint64_t(0));  // of a GPU: passed over
  put(uint16_t(1)), put(uint16_t(0)), put(24u), put(uint64_t(sizeof text)), put(0u), put(0u);
  image.insert(image.end(), text, text + sizeof text);
  wrapper.data = image.data();
  void** handle = __cudaRegisterFatBinary(&wrapper);
  __cudaRegisterFunction(handle, &stub, (char*)"add", "add", -1, 0, 0, 0, 0, 0);
  __cudaRegisterFunction(handle, &strange, (char*)"none", "none", -1, 0, 0, 0, 0, 0);
  return 0;
}();
extern "C" {
const void* the_image() { return image.data(); }
int add(void* at, int number, int threads, size_t shared, int is_strange, int most) {
  struct { void* at; int number; } given = {at, number};
  void* arguments[] = {&given};
  if (most) cudaFuncSetAttribute(&stub, 8, most);
  return cudaLaunchKernel(is_strange ? &strange : &stub, {1, 1, 1}, {unsigned(threads), 1, 1}, arguments, shared, nullptr);
}
int copy(void* to, const void* from, size_t size, int kind) { return cudaMemcpyAsync(to, from, size, kind, nullptr); }
int fill(void* to, int byte, size_t size) { return cudaMemsetAsync(to, byte, size, nullptr); }
int last() { return cudaGetLastError(); }
}
"""


class Device:
    """Works when it is asked to."""

    def __init__(self) -> None:
        self.memory, self.work = DeviceMemory(1 << 20), list[Work]()
        self.runtime = CudaRuntime(self.work.append, self.copy_from_host, Allowed())

    def copy_from_host(self, target: int, source: int, size: int) -> None:
        data = np.frombuffer(ctypes.string_at(source, size), np.uint8)
        self.work.append(lambda memory: memory.write(target, data))

    def finish(self) -> None:
        while self.work:
            self.work.pop(0)(self.memory)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device()


@pytest.fixture(scope="module")
def library(device: Device, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("library")
    (folder / "library.cpp").write_text(_LIBRARY.replace("PTX", _PTX, 1))
    command = ["c++", "-std=c++20", "-shared", "-fPIC", str(folder / "library.cpp"), "-o", str(folder / "library.so")]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(folder / "library.so"))
    loaded.add.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    loaded.copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]
    loaded.fill.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t]
    loaded.the_image.restype = ctypes.c_uint64
    return loaded


def numbers(device: Device, at: int) -> list[int]:
    device.finish()
    return device.memory.read(at, 128).view(np.int32).tolist()


def test_launches_and_copies(device: Device, library: ctypes.CDLL) -> None:
    at, host = device.memory.allocate(128), np.arange(32, dtype=np.int32)
    with device.runtime.calling():
        assert library.copy(at, host.ctypes.data, 128, 1) == 0
        assert library.add(at, 5, 32, 0, 0, 0) == 0
        assert library.add(at, 7, 32, 0, 0, 0) == 0
    assert not device.memory.read(at, 128).any(), "nothing is done before it is asked for"
    assert numbers(device, at) == [number + 12 for number in range(32)]
    assert library.fill(at, 1, 128) == 0
    assert numbers(device, at) == [0x01010101] * 32
    (kernel, executed), *others = device.runtime.executed.values()
    assert not others
    assert (executed == 64).all()
    assert kernel.name == "add"
    assert kernel.instructions[0].line == read_kernel(_PTX, "add").instructions[0].line, "lines are those of the module"


def test_what_is_wrong_is_told(device: Device, library: ctypes.CDLL) -> None:
    at = device.memory.allocate(128)
    with pytest.raises(KernelFault, match="add: a block of"), device.runtime.calling():
        assert library.add(at, 5, 2048, 0, 0, 0) == 999
    assert library.last() == 999
    assert library.last() == 0, "an error is told once"
    with pytest.raises(KernelFault, match="50000 bytes of shared memory, of at most 49152"), device.runtime.calling():
        library.add(at, 5, 32, 50000, 0, 0)
    with device.runtime.calling():
        library.add(at, 5, 32, 50000, 0, 60000)
    with pytest.raises(PtxError, match="there is no kernel none"), device.runtime.calling():
        library.add(at, 5, 32, 0, 1, 0)
    with pytest.raises(NotImplementedError, match="a copy of kind 2"), device.runtime.calling():
        library.copy(at, at, 4, 2)
    with pytest.raises(KernelFault, match=r"load of address .* which was never written"):
        device.finish()


def test_an_image_without_ptx(library: ctypes.CDLL) -> None:
    assert ptx_of(library.the_image()).splitlines()[1:3] == [".version 9.0", ".target sm_80"]
    with pytest.raises(ValueError, match="no fat binary"):
        ptx_of(library.the_image() + 2)


def test_nvcc_is_asked_for_ptx(tmp_path: pathlib.Path) -> None:
    wrapper = pathlib.Path(sys.modules["tools.ptx.cuda_libraries"].__file__ or "").parent / "nvcc_ptx.sh"
    told = tmp_path / "nvcc"
    told.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    told.chmod(0o755)
    command = [str(wrapper), "-gencode=arch=compute_80,code=sm_80", "-DNAME=a", "-c", "in.cu"]
    printed = subprocess.run(command, env={"AENGINE_NVCC": str(told), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["-gencode=arch=compute_80,code=compute_80", "-DNAME=a", "-c", "in.cu", "-lineinfo", "--no-compress"]
