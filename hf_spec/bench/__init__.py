"""Benchmark of decoding methods, side by side in one run: speed, acceptance, and whether the text stays the same."""

from .card import add_to_card
from .prompts import Prompt, numbered_prompts, read_prompts
from .report import BenchReport, Figures, import_pyplot
from .runner import BenchSettings, Contender, run_bench
from .tree_search import Tree, expected_length, rank_accuracies, search_tree

__all__ = [
    "BenchReport",
    "BenchSettings",
    "Contender",
    "Figures",
    "Prompt",
    "Tree",
    "add_to_card",
    "expected_length",
    "import_pyplot",
    "numbered_prompts",
    "rank_accuracies",
    "read_prompts",
    "run_bench",
    "search_tree",
]
