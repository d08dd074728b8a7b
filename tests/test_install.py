"""The source distribution installs, with a compiler and without one, and what is installed works.

The new virtual environments see torch and the build's tools in the packages of this one, so nothing is downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # the build: 65 s of one core

ROOT = Path(__file__).parent.parent
TOOLS = {"cmake": shutil.which("cmake"), "make": shutil.which("make")}  # pip fetches what is missing, if it may
STEP = """
import json, torch, onebit
p = torch.nn.Parameter(torch.ones(16))
p.grad = torch.ones(16)
opt = onebit.OneBitLamb([p], lr=0.1, freeze_step=1)
opt.step()
opt.step()
kernels, reason = onebit.kernels.choose(torch.device("cpu"), torch.float32)
result = {"file": onebit.__file__, "kernels": kernels, "reason": reason, "stage": opt.stage.name, "p": p.tolist()}
print(json.dumps(result))
"""


def run(*command, cwd, **environment):
    """What it prints. The package's own settings and import paths of this run do not count."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ONEBIT", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=ROOT)
    (file,) = folder.iterdir()
    return file


def install(sdist, folder, **environment):
    """Install it into a new virtual environment and return that one's folder of programs."""
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    programs = venv / "bin"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(programs / "python", "-c", where, cwd=folder).strip())
    # an editable install in this environment does not show there: .pth files of a folder named in one are not read
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    run(programs / "python", "-m", "pip", "install", *options, sdist, cwd=folder, **environment)
    return programs


def try_out(programs, folder):
    """Make two steps with the installed package, then ask its command line about itself."""
    result = json.loads(run(programs / "python", "-c", STEP, cwd=folder))
    assert Path(result["file"]).is_relative_to(programs.parent)
    assert result["stage"] == "COMPRESSED"
    assert max(result["p"]) < 1
    shown = run(programs / "onebit", "info", cwd=folder, COLUMNS="200")
    assert f"{result['kernels']} ({result['reason']}" in shown
    return result


@pytest.mark.skipif(not (all(TOOLS.values()) and shutil.which("c++")), reason="needs cmake, make and c++ on the PATH")
def test_with_a_compiler_the_native_kernels_are_built(sdist, tmp_path):
    result = try_out(install(sdist, tmp_path, CMAKE_BUILD_PARALLEL_LEVEL="2"), tmp_path)
    assert result["kernels"] == "native"
    assert result["reason"].startswith("built")


@pytest.mark.skipif(not all(TOOLS.values()), reason="needs cmake and make on the PATH")
def test_without_a_compiler_the_package_installs_and_says_that_it_uses_the_reference_kernels(sdist, tmp_path):
    path = tmp_path / "path"
    path.mkdir()
    for name, program in TOOLS.items():
        (path / name).symlink_to(program)
    missing = {"PATH": str(path), "CC": "/nonexistent", "CXX": "/nonexistent"}
    result = try_out(install(sdist, tmp_path, **missing), tmp_path)
    assert result["kernels"] == "reference"
    assert "were not built when onebit was installed" in result["reason"]
