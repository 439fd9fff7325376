"""Compare ways of decoding side by side in one run: speed, acceptance, and whether the text stays the same."""

from .prompts import Prompt, read_prompts
from .report import BenchReport, Figures, import_pyplot
from .runner import BenchSettings, Contender, run_bench

__all__ = [
    "BenchReport",
    "BenchSettings",
    "Contender",
    "Figures",
    "Prompt",
    "import_pyplot",
    "read_prompts",
    "run_bench",
]
