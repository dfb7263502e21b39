"""Makes the pages of the site from the READMEs, the package's tables and bench/results. Needs neither torch nor a build."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))  # this tree's tables, whatever is installed
