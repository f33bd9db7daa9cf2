"""The export stage on a tiny run: what it writes, what it refuses, and that a failed verification puts nothing in place."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from drafter_cases import tiny_drafter
from safetensors.torch import load_file, save_file

import export.stage
from common.files import sha256_file, write_json
from configs.schema import AcceptorName, Config
from data.feature_manifest import FeatureManifest, HeadEntry, ShardEntry, manifest_path
from data.feature_shards import FeatureLayout, FeatureRow, write_shard
from drafter.config import DrafterConfig, drafter_config
from drafter.folder import drafter_fingerprint, load_drafter, write_drafter
from drafter.weights import expected_shapes
from export.card_results import MEANINGS, acceptance
from export.folder import Output, write_folder
from export.stage import export_drafter
from export.verify import VerifyJob, find_anchors, verify_export, verify_in_new_process
from target.head import save_target_head
from target.identity import target_identity
from target.load import Target

Reader = Callable[[str], torch.Tensor]
RESPONSES = (1, 12, 20)  # a response of one token has no anchor


def write_features(config: Config, target: Target) -> None:
    """Three rows of random features as extract would store them, and the target's true head."""
    folder = config.run.folder / "features"
    folder.mkdir(parents=True)
    taps = len(config.drafter.target_layer_ids)
    rows, entries = [], []
    for index, length in enumerate(RESPONSES):
        generator = torch.Generator().manual_seed(index)
        num_tokens = 6 + length
        row = FeatureRow(
            sample_id=f"sample-{index}",
            source="tiny",
            task="tiny",
            split="train",
            input_ids=torch.randint(0, 256, (num_tokens,), generator=generator),
            loss_mask=torch.arange(num_tokens) >= 6,
            features=torch.randn(num_tokens, taps, config.target.hidden_size, generator=generator),
        )
        rows.append(row)
        entry = {
            "sample_id": row.sample_id,
            "source": row.source,
            "task": row.task,
            "split": row.split,
        }
        entries.append(entry | {"num_tokens": num_tokens, "num_response_tokens": length})
    shard = folder / "shard-000000.parquet"
    write_shard(shard, rows, FeatureLayout("fp32", taps, config.target.hidden_size))
    head = folder / "target_head.safetensors"
    save_target_head(head, target)
    settings = target_identity(config.target) | {
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "hidden_size": 64,
        "num_layers": 6,
        "vocab_size": 320,
        "codec": "fp32",
    }
    sums = (len(rows), sum(len(r.input_ids) for r in rows), shard.stat().st_size)
    entry = ShardEntry(shard.name, *sums, sha256_file(shard), entries)
    manifest = FeatureManifest(settings, [entry], [], HeadEntry(head.name, sha256_file(head)))
    write_json(manifest_path(folder), manifest.to_json())


def write_checkpoint(config: Config, seed: int = 0) -> Path:
    drafter = tiny_drafter(drafter_config(config), seed)
    folder = config.run.folder / "checkpoints" / "step-00000006"
    write_drafter(folder, drafter.config, drafter.state_dict(), torch.float32)
    sums = {p.name: sha256_file(p) for p in folder.iterdir()}
    entry = {"folder": folder.name, "step": 6, "sha256": sums, "tree_acceptance": 1.2}
    index = {"checkpoints": [entry], "last": folder.name, "best": folder.name}
    write_json(folder.parent / "index.json", index)
    return folder


@pytest.fixture
def run(
    request: pytest.FixtureRequest,
    tiny_config: Callable[..., Config],
    tiny_target: Callable[..., Target],
    monkeypatch: pytest.MonkeyPatch,
) -> Config:
    """A tiny run with features and one checkpoint; `request.param` are overrides of the recipe.

    Verification stays in this process, which saves seconds; two tests below let it have its own.
    """
    monkeypatch.setattr(export.stage, "verify_in_new_process", verify_export)
    config = tiny_config("llama", vars(request).get("param", ()))
    write_features(config, tiny_target("llama"))
    write_checkpoint(config)
    return config


SLIDING = (
    'drafter.layer_types=["sliding_attention","full_attention"]',
    "drafter.sliding_window=5",
)


@pytest.mark.parametrize("run", [(), SLIDING], indirect=True, ids=["full", "sliding"])
def test_export_is_the_checkpoint_rounded_to_bf16(run):
    checkpoint = run.run.folder / "checkpoints" / "step-00000006"
    exported = export_drafter(run)
    assert exported.folder == run.run.folder / "export" / "zlab"
    master = load_file(checkpoint / "model.safetensors")
    written = load_file(exported.folder / "model.safetensors")
    assert written.keys() == master.keys()
    assert all(torch.equal(t, master[n].bfloat16()) for n, t in written.items())
    assert exported.verification.num_rows == 2  # the row without an anchor is passed over
    assert exported.verification.num_blocks == 16
    assert exported.verification.reload_difference <= 1e-5
    assert 1e-4 < exported.verification.rounding_difference < 0.1
    config = json.loads((exported.folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["dflash_config"]["mask_token_id"] == 259


def test_folder_has_tokenizer_card_and_no_leftovers_and_is_replaced_with_equal_bytes(run):
    folder = export_drafter(run).folder
    target = Path(run.target.model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (target / name).read_bytes()
    first = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / "stale").touch()
    export_drafter(run)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == first
    assert [p.name for p in folder.parent.iterdir()] == ["zlab"]


def report_of(fingerprint: str) -> dict[str, Any]:
    row = {
        "task": "all",
        "acceptor": "tree",
        "budget": 64,
        "temperature": None,
        "mode": "replay",
        "num_prompts": 7,
        "acceptance_macro": 2.3456,
        "acceptance_micro": 2.5,
        "ci95": [2.1, 2.6],
    }
    return {"drafter": fingerprint, "rows": [row, row | {"task": "math", "acceptance_macro": 9.9}]}


def test_card_shows_this_checkpoints_acceptance_and_no_others(run):
    report = run.run.folder / "evaluation" / "report.json"
    checkpoint = run.run.folder / "checkpoints" / "step-00000006"
    assert "Not evaluated before the export." in card(run)
    write_json(report, report_of(drafter_fingerprint(checkpoint)))
    text = card(run)
    assert "| tree | 64 | as recorded | 7 | 2.346 | 2.100 to 2.600 | 2.500 |" in text
    assert "9.9" not in text
    assert "license: apache-2.0" in text
    assert "hidden_states[i+1]" in text
    assert "| tiny | unverified | 3 | 33 |" in text
    write_json(report, report_of("another"))
    assert "is of another checkpoint" in card(run)
    for broken in ([], {"drafter": drafter_fingerprint(checkpoint)}, {"rows": []}):
        write_json(report, broken)
        with pytest.raises(ValueError, match=r"report\.json does not hold what it should"):
            card(run)


def test_card_has_what_a_reader_of_the_hub_looks_for(run):
    """Every budget with its interval, tasks side by side, the public name of the target, licences as they were checked."""
    source = {"name": "gsm8k", "kind": "packages", "path": "gsm8k", "split": "test"}
    values = run.model_dump(mode="json")
    values["data"]["sources"].append(run.data.sources[0].model_dump(mode="json") | source)
    values["export"]["base_model"] = "owner/target"
    config = Config.model_validate(values)
    report = report_of(drafter_fingerprint(run.run.folder / "checkpoints" / "step-00000006"))
    row = dict(report["rows"][0])
    more = [
        row | {"acceptor": "chain", "budget": None, "acceptance_macro": 1.5, "temperature": 0.0},
        row | {"task": "code", "acceptance_macro": 3.25, "num_prompts": 3},
        row | {"mode": "live", "temperature": 0.0, "num_prompts": 2},
    ]
    report["rows"] = [*report["rows"], *more]
    report["lossless"] = {"num_prompts": 2, "num_equal": 2}
    report["facts"] = {"live dtype": "bfloat16"}
    write_json(run.run.folder / "evaluation" / "report.json", report)
    text = (export_drafter(config, published_as="me/drafter").folder / "README.md").read_text()
    assert "base_model: owner/target\n" in text
    assert "when the chain is verified and 2.35 with a draft tree of 64 nodes" in text
    assert "| code | 3 | 3.25 |" in text
    assert "**Live** decoding in bfloat16" in text
    assert "on 2 of 2 prompts decoded live. In bfloat16 two tokens may tie" in text
    assert "| gsm8k | MIT | 0 | 0 |" in text
    assert '"model": "me/drafter", "num_speculative_tokens": 3' in text
    assert "vllm serve owner/target" in text
    assert str(run.run.folder) not in text


def test_card_says_what_every_acceptor_verifies_and_where_an_interval_cannot_be():
    assert set(MEANINGS) == {"plain", *get_args(AcceptorName)}
    row = report_of("any")["rows"][0] | {"acceptor": "tree_cost", "num_prompts": 1, "ci95": None}
    text = acceptance({"rows": [row]})
    assert "`tree_cost`: the likeliest prefixes while they paid" in text
    assert "| tree_cost | 64 | as recorded | 1 | 2.346 | one prompt | 2.500 |" in text


@pytest.mark.parametrize(
    ("form", "own"), [("speculators", False), ("zlab", True), ("speculators", True)]
)
def test_other_formats_are_verified_too(run, form, own, tiny_target):
    exported = export_drafter(run, form, own)
    name = f"{form}-self-contained" if own else form
    assert exported.folder == run.run.folder / "export" / name
    assert exported.verification.reload_difference <= 1e-5
    tensors = load_file(exported.folder / "model.safetensors")
    assert ("lm_head.weight" in tensors) == own
    if own:
        assert torch.equal(tensors["lm_head.weight"], tiny_target("llama").lm_head)
    assert load_drafter(exported.folder, "cpu", torch.float32).config == drafter_config(run)


def test_a_target_that_changed_since_extract_is_noticed(run):
    """Same names, sizes and identity sample; one row of the embedding differs."""
    job = damage(run, lambda state: None)
    copy = run.run.folder / "target"
    shutil.copytree(run.target.model, copy)
    (file,) = copy.glob("*.safetensors")
    state = load_file(file)
    state["model.embed_tokens.weight"][7] += 1
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the features' embedding is not that of .* token 7"):
        verify_export(replace(job, target=copy))


def card(config: Config) -> str:
    return (export_drafter(config).folder / "README.md").read_text()


def damage(config: Config, change: Callable[[dict[str, torch.Tensor]], None]) -> VerifyJob:
    """An export whose tensors are not those of the checkpoint."""
    folder = config.run.folder
    export_drafter(config)
    file = folder / "export" / "zlab" / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)
    checkpoint = folder / "checkpoints" / "step-00000006"
    return VerifyJob(
        folder / "export" / "zlab", checkpoint, folder / "features", Path(config.target.model), 2, 1
    )


def swap_gate_and_up(state: dict[str, torch.Tensor]) -> None:
    gate, up = "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"
    state[gate], state[up] = state[up], state[gate]


def one_weight(state: dict[str, torch.Tensor]) -> None:
    state["fc.weight"][0, 0] += 0.5


@pytest.mark.parametrize("change", [swap_gate_and_up, one_weight])
def test_verification_notices_other_weights(run, change):
    with pytest.raises(ValueError, match=r"does not compute what was trained: its logits differ"):
        verify_export(damage(run, change))


def test_the_refusal_of_a_new_process_arrives(run):
    job = damage(run, swap_gate_and_up)
    with pytest.raises(ValueError, match=r"does not compute what was trained: its logits differ"):
        verify_in_new_process(job)


def test_verification_refuses_a_zero_head(run):
    job = damage(run, lambda state: None)
    file = run.run.folder / "features" / "target_head.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=f"{file.name} differs from its sum"):
        verify_export(job)
    manifest = json.loads(manifest_path(file.parent).read_text())
    manifest["head"]["sha256"] = sha256_file(file)  # a target that was zero when it was extracted
    write_json(manifest_path(file.parent), manifest)
    with pytest.raises(ValueError, match=r"the target's embedding is zero or not finite"):
        verify_export(job)


def test_a_failed_verification_puts_nothing_in_place_and_keeps_what_was_there(run, monkeypatch):
    folder = export_drafter(run).folder
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    write_checkpoint(run, seed=1)

    def write_wrong(
        path: Path, config: DrafterConfig, read: Reader, dtype: torch.dtype, output: Output
    ):
        state = {name: read(name) for name in expected_shapes(config)}
        swap_gate_and_up(state)
        write_folder(path, config, state.__getitem__, dtype, output)

    monkeypatch.setattr(export.stage, "write_folder", write_wrong)
    with pytest.raises(ValueError, match="does not compute what was trained"):
        export_drafter(run)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == ["zlab"]


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("drafter", {"mask_token_id": 258}, "mask_token_id=259, this run has 258"),
        ("drafter", {"block_size": 8}, "block_size=4, this run has 8"),
        ("drafter", {"target_layer_ids": (1, 2, 3)}, r"target_layer_ids=\(1, 2, 4\), this run has"),
        ("target", {"hidden_size": 32}, "hidden_size=64, this run has 32"),
        ("target", {"vocab_size": 300}, "vocab_size=320, this run has 300"),
    ],
)
def test_a_recipe_that_disagrees_is_refused_with_both_values(run, section, change, message):
    other = run.model_copy(update={section: vars(run)[section].model_copy(update=change)})
    with pytest.raises(ValueError, match=f"the checkpoint .* was made with {message}"):
        export_drafter(other)
    assert not (run.run.folder / "export").exists()


def test_features_of_another_target_are_refused(run):
    manifest = run.run.folder / "features" / "manifest.json"
    value = json.loads(manifest.read_text())
    value["settings"]["weights"] = "0" * 64
    write_json(manifest, value)
    with pytest.raises(ValueError, match=r"the features in .* was made with weights='0000"):
        export_drafter(run)


def test_anchors_are_spread_over_positions_that_have_a_next_token():
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1]).bool()
    assert find_anchors(mask, 8).tolist() == [2, 3, 4, 7]
    assert find_anchors(mask, 2).tolist() == [2, 7]
    assert find_anchors(mask[:3], 2).tolist() == []


def test_the_command_prints_path_and_commands_and_a_mistake_is_one_line(run, tmp_path):
    recipe = tmp_path / "tiny.json"
    recipe.write_text(json.dumps(run.model_dump(mode="json")))  # JSON is YAML

    def command(*overrides: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-m", "export", str(recipe), *overrides]
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        return subprocess.run(arguments, capture_output=True, text=True, env=environment)

    done = command()
    assert done.returncode == 0, done.stderr
    assert f"exported step-00000006 to {run.run.folder / 'export' / 'zlab'}" in done.stdout
    assert '"num_speculative_tokens": 3' in done.stdout
    wrong = command("drafter.mask_token_id=258")
    assert wrong.returncode == 2
    assert wrong.stderr.strip().splitlines()[-1].startswith("error: the checkpoint")
    assert "Traceback" not in wrong.stderr


def test_an_exported_folder_loads_as_a_drafter(run):
    folder = export_drafter(run).folder
    drafter = load_drafter(folder, "cpu", torch.float32)
    assert drafter.config == drafter_config(run)


def test_a_second_export_at_work_is_refused(run):
    with (run.run.folder / ".export.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another process holds .*\.export\.lock"):
            export_drafter(run)
