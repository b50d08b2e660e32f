"""Builds csrc/ into one abi3 extension on torch's stable ABI; metadata is in pyproject.toml.

GRPO_KERNELS_NO_CPP=1 skips the build. Where no compiler works the install goes on without the
extension: every operation then runs its plain PyTorch definition on the CPU.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

TORCH_2_10 = "0x020a000000000000"  # oldest libtorch that the extension loads into
NO_CPP = os.environ.get("GRPO_KERNELS_NO_CPP", "0") not in ("", "0")


def extension_arguments() -> dict:
    """The `setup()` arguments that build csrc/."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class BuildExtensionOrWarn(BuildExtension):
        """A failed build warns instead of failing the install."""

        def run(self):
            try:
                super().run()
            except Exception as error:
                if os.environ.get("GRPO_KERNELS_REQUIRE_CPP", "0") not in ("", "0"):
                    raise
                print(
                    "\n*** grpo-kernels: the C++ CPU kernels could not be built; the CPU runs the"
                    "\n*** slower PyTorch definition. Install a C++20 compiler (g++ 11, clang 14 or"
                    "\n*** newer) and install again, or set GRPO_KERNELS_NO_CPP=1 to silence this."
                    f"\n*** Reason: {error}\n",
                    file=sys.stderr,
                )

    root = Path(__file__).parent
    extension = CppExtension(
        "grpo_kernels._C",
        sorted(str(path.relative_to(root)) for path in (root / "csrc").glob("*.cpp")),
        depends=sorted(str(path.relative_to(root)) for path in (root / "csrc").glob("*.h")),
        extra_compile_args=[
            "-O3",
            "-g0",
            "-std=c++20",
            "-fvisibility=hidden",
            "-ffp-contract=fast",
            "-Wall",
            "-Wno-psabi",  # vectors pass between inlined functions only
            f"-DTORCH_TARGET_VERSION={TORCH_2_10}",
        ],
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtensionOrWarn},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**({} if NO_CPP else extension_arguments()))
