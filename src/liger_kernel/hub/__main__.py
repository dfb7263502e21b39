"""python -m liger_kernel.hub DIR [--no-bundle]: writes a kernel repository for transformers' `use_kernels`."""

import argparse
import sys

from liger_kernel.hub import write_repository


def main():
    parser = argparse.ArgumentParser(prog="python -m liger_kernel.hub", description="Writes a kernel repository from this package.")
    parser.add_argument("folder")
    parser.add_argument("--no-bundle", action="store_true", help="only the variant whose layers are the installed package's")
    arguments = parser.parse_args()
    for path in write_repository(arguments.folder, not arguments.no_bundle):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
