#!/usr/bin/env bash
# Puts a CUDA 12 compiler into a folder: bash tools/cuda12.sh FOLDER, then FOLDER/bin/nvcc. For
# tools/release.sh, where no toolkit of CUDA 12.5 or later is installed. x86-64, Debian.
#
# NVIDIA's wheels of CUDA 12 have headers, run time and ptxas, and no nvcc (those of CUDA 13 have
# one), and drivers of CUDA 12 load no cubin of ptxas 13: its ELF has ABI version 8, theirs 7. Debian
# packages the nvcc of 12.4; ptxas 12.9 reads the PTX of all earlier ones.
#
# It compiles no relocatable device code, which nvlink 12.4 would have to link: no NVSHMEM plugin.
#
#   from                              version     what
#   Debian: nvidia-cuda-toolkit       12.4.131    nvcc, cudafe++, cicc, fatbinary, nvlink
#   pip: nvidia-cuda-nvcc-cu12        12.4.131    crt/, the headers that belong to cudafe++
#   pip: nvidia-cuda-nvcc-cu12        12.9.86     ptxas
#   pip: nvidia-cuda-runtime-cu12     12.9.79     headers, static run time
#   pip: nvidia-cuda-cccl-cu12        12.9.27     headers
set -euo pipefail
root=$(realpath -m "${1:?the folder to fill}")
rm -rf "$root"
mkdir -p "$root"/{bin,include,lib,nvvm/bin,download}
cd "$root/download"

# wheel NAME VERSION: unpacks it into NAME-VERSION/
wheel() {
  "${PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps "$1==$2"
  "${PYTHON:-python3}" -m zipfile -e "${1//-/_}-$2"*.whl "$1-$2"
}
wheel nvidia-cuda-nvcc-cu12 12.4.131
wheel nvidia-cuda-nvcc-cu12 12.9.86
wheel nvidia-cuda-runtime-cu12 12.9.79
wheel nvidia-cuda-cccl-cu12 12.9.27

# From the mirror that the machine uses; its own lists and packages stay as they are.
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/$' || true)
[ -n "$mirror" ] || { echo "no mirror of Debian is known: set CUDACXX to an nvcc of CUDA 12" >&2; exit 1; }
mkdir -p apt/lists/partial apt/cache/archives/partial
touch apt/status
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror trixie non-free" >apt/sources
apt=(-q -o Dir::Etc::sourcelist="$PWD/apt/sources" -o Dir::Etc::sourceparts=-
  -o Dir::State::lists="$PWD/apt/lists" -o Dir::State::status="$PWD/apt/status"
  -o Dir::Cache="$PWD/apt/cache" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" update
apt-get "${apt[@]}" download 'nvidia-cuda-toolkit=12.4.131*'
dpkg -x nvidia-cuda-toolkit_*.deb debian

cp debian/usr/lib/nvidia-cuda-toolkit/bin/nvcc "$root/bin"
cp -r debian/usr/lib/nvidia-cuda-toolkit/bin/crt "$root/bin"
cp debian/usr/bin/{bin2c,cudafe++,fatbinary,nvlink} "$root/bin"
cp debian/usr/lib/nvidia-cuda-toolkit/bin/cicc "$root/nvvm/bin"
cp -r debian/usr/lib/nvidia-cuda-toolkit/libdevice "$root/nvvm"
cp nvidia-cuda-nvcc-cu12-12.9.86/nvidia/cuda_nvcc/bin/ptxas "$root/bin"
cp -r nvidia-cuda-runtime-cu12-*/nvidia/cuda_runtime/include/. "$root/include"
cp -r nvidia-cuda-cccl-cu12-*/nvidia/cuda_cccl/include/. "$root/include"
cp -r nvidia-cuda-nvcc-cu12-12.4.131/nvidia/cuda_nvcc/include/. "$root/include"
cp nvidia-cuda-runtime-cu12-*/nvidia/cuda_runtime/lib/*.a "$root/lib"
# nvcc always links it, and nvlink 12.4 refuses that of 12.9. No kernel launches kernels: empty.
rm "$root/lib/libcudadevrt.a"
ar cr "$root/lib/libcudadevrt.a"
chmod +x "$root"/bin/* "$root"/nvvm/bin/*
cat >"$root/bin/nvcc.profile" <<'END'
TOP              = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib:
PATH            += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES        +=  "-I$(TOP)/include" $(_SPACE_)
LIBRARIES       =+ $(_SPACE_) "-L$(TOP)/lib"
END
cd "$root"
rm -r download
bin/nvcc --version | tail -n 1
bin/ptxas --version | tail -n 1
