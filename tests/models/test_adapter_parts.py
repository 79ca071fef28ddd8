"""Adapters that PEFT writes: `b @ a` is what PEFT adds to the model's weights when it merges them, of every family and for every rank."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import dense_cases
import mixture_cases
import peft
import plain_cases
import pytest
import torch
import transformers
from row_tensors import held_parts, with_tensors
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from test_shard_weights import load
from tiny_adapters import save_adapter, write_adapter
from torch import Tensor

import aengine
from aengine.api.errors import AdapterError
from aengine.kernels.arrays import array_dtype
from aengine.models.adapters import Adapter, load_adapter
from aengine.models.choice import find_spec
from aengine.models.config.model_config import load_spec
from aengine.models.sharding import sharded_weights
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard

CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES)}
QUICK = ("qwen3", "gpt2", "gpt-neox", "glm", "deepseek-v3", "phi3")
REFUSED = re.compile(r"vision|projector|\.experts\.|kv_b_proj|shared_expert_gate")
FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def linear_modules(model: transformers.PreTrainedModel) -> list[str]:
    """All that an adapter can change, but for tied heads; and but for MLPs of mixtures, for whose names PEFT writes adapters of experts."""
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    head = model.get_output_embeddings()
    others = [REFUSED]
    if model.get_input_embeddings().weight is head.weight:
        others.append(re.compile(r"lm_head|embed_out"))
    if any(".experts." in name for name, _ in model.named_parameters()):
        others.append(re.compile(r"(gate|up|down)_proj"))
    modules = (name for name, module in model.named_modules() if isinstance(module, kinds))
    return [name for name in modules if not any(other.search(name) for other in others)]


def with_adapter(model: transformers.PreTrainedModel, modules: list[str], **fields: Any) -> peft.PeftModel:
    """Random in both matrices."""
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=modules, init_lora_weights=False, **fields)).eval()


def sums(adapter: Adapter, spec: ModelSpec, shard: Shard) -> dict[str, Tensor]:
    """What is added to each matrix that a rank holds."""
    found = {}
    for name, part in sharded_weights(spec, shard).items():
        stem = name.removesuffix(".weight")
        if stem != name and len(part.shape) == 2:
            found[stem] = torch.zeros(part.shape)
            for low in adapter.parts.get(stem, ()):
                if stem == "embedding":
                    found[stem] = (low.b @ low.a).t()
                else:
                    found[stem][low.rows.start : low.rows.stop] = low.b @ low.a
    assert adapter.parts.keys() <= found.keys() | {"head"}
    return found


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_sums_are_those_of_merged_weights(name: str, tmp_path: pathlib.Path) -> None:
    """Whole, and what ranks hold of it; matrices and embeddings, with ranks and alphas of their own."""
    model = CASES[name].make()
    model.save_pretrained(tmp_path / "model")
    modules = linear_modules(model)
    embedding = next(each for each, module in model.named_modules() if module is model.get_input_embeddings())
    tied = load_spec(tmp_path / "model").tied_head
    patterns = {"rank_pattern": {modules[0]: 3, modules[-1].rpartition(".")[2]: 7}, "alpha_pattern": {r"0\.\w+\.\w+": 5}}
    adapted = with_adapter(model, modules if tied else [*modules, embedding], r=4, lora_alpha=6, use_rslora=len(name) % 2 == 0, **patterns)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    spec = load_spec(tmp_path / "model")
    base, merged = (load(tmp_path / folder, WHOLE) for folder in ("model", "merged"))
    for shard in (WHOLE, *(Shard(index, 2, exact=exact) for index in range(2) for exact in (True, False)), Shard(1, 2, 1, 2)):
        adapter = loaded(tmp_path / "adapter", spec, torch.float32, shard)
        held = sharded_weights(spec, shard)
        for stem, found in sums(adapter, spec, shard).items():
            part = held[f"{stem}.weight"]
            rows = merged[part.source_name] - base[part.source_name]
            torch.testing.assert_close(found, torch.cat(held_parts(rows, part)), atol=1e-5, rtol=1e-5, msg=stem)
            if not re.search(r"router|shared_gate|positions|shared\.|down|gate_up", stem) and (stem != "embedding" or not tied):
                assert bool(found.any()), stem
        for parts in adapter.parts.values():
            assert all(each.a.is_contiguous() and each.b.is_contiguous() for each in parts)
            assert all(first.rows.stop <= second.rows.start for first, second in itertools.pairwise(parts))
    names = {each.rpartition(".")[2] for each in (modules if tied else [*modules, embedding])}
    assert (adapter.low_rank, adapter.modules) == (7, tuple(sorted(names)))


def loaded(folder: pathlib.Path, spec: Any, dtype: torch.dtype, *shard: Shard, **options: Any) -> Adapter:
    """With matrices of torch."""
    return with_tensors(load_adapter(folder, spec, array_dtype(dtype), *shard, **options))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Folders of tiny random models, by the names of cases."""

    def make(name: str) -> pathlib.Path:
        path = tmp_path_factory.mktemp(name)
        CASES[name].make().save_pretrained(path)
        return path

    return functools.cache(make)


def test_the_writer_of_tests(made, tmp_path: pathlib.Path) -> None:
    """PEFT reads what `write_adapter` writes as we do."""
    model = made("mistral")
    write_adapter(tmp_path / "adapter", model, rank=5, alpha=3, head=True, embedding=True, use_rslora=True)
    adapted = peft.PeftModel.from_pretrained(CASES["mistral"].make(), tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    spec = load_spec(model)
    base, merged = load(model, WHOLE), load(tmp_path / "merged", WHOLE)
    for stem, found in sums(loaded(tmp_path / "adapter", spec, torch.float32), spec, WHOLE).items():
        torch.testing.assert_close(found, merged[f"{stem}.weight"] - base[f"{stem}.weight"], atol=1e-5, rtol=1e-5, msg=stem)


def test_the_bundled_adapter() -> None:
    package = pathlib.Path(aengine.__file__).parent / "models"
    adapter = loaded(package / "demo_lora", load_spec(package / "demo_model"), torch.bfloat16)
    assert (adapter.low_rank, len(adapter.modules)) == (8, 7)
    stored = load_file(package / "demo_lora" / FILE)
    assert adapter.nbytes == sum(tensor.nbytes for tensor in stored.values())
    first = adapter.parts["layers.0.qkv"][0]
    assert torch.equal(first.a, stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    assert torch.equal(first.b, 2 * stored["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"])


def test_rounding_and_memory(made, tmp_path: pathlib.Path) -> None:
    """The scale is applied before B is rounded; nothing is mapped from the file."""
    model = made("mistral")
    write_adapter(tmp_path, model, rank=7, alpha=3, dtype=torch.float16)
    stored = load_file(tmp_path / FILE)
    for dtype in (torch.bfloat16, torch.float32):
        low = loaded(tmp_path, load_spec(model), dtype).parts["layers.2.down"][0]
        name = "base_model.model.model.layers.2.mlp.down_proj.lora_{}.weight"
        assert torch.equal(low.b, (stored[name.format("B")].float() * (3 / 7)).to(dtype))
        assert torch.equal(low.a, stored[name.format("A")].to(dtype))
    write_adapter(tmp_path, model, rank=7)
    low = loaded(tmp_path, load_spec(model), torch.float32).parts["layers.2.down"][0]
    kept = low.a.clone()
    with open(tmp_path / FILE, "r+b") as file:
        file.write(bytes((tmp_path / FILE).stat().st_size))
    assert torch.equal(low.a, kept)


def test_shared_experts(made, tmp_path: pathlib.Path) -> None:
    """As adapters name them that were made when PEFT did not yet rename what it finds in mixtures."""
    model = made("qwen2-moe")
    write_adapter(tmp_path, model, rank=2, alpha=2, targets=("up_proj",))
    stored = load_file(tmp_path / FILE)
    parts = loaded(tmp_path, load_spec(model), torch.float32).parts
    up = parts["layers.0.shared.gate_up"][0]
    name = "base_model.model.model.layers.0.mlp.shared_expert.up_proj.lora_{}.weight"
    assert (up.rows, parts["layers.1.gate_up"][0].rows) == (range(48, 96), range(96, 192))
    assert torch.equal(up.a, stored[name.format("A")])
    assert torch.equal(up.b, stored[name.format("B")])


def test_a_tied_head_and_its_embedding_change_apart(made, tmp_path: pathlib.Path) -> None:
    """As in PEFT before it merges them. Of ranks that all have the whole embedding each has its part of the head."""
    model = made("cohere2")
    spec = load_spec(model)
    write_adapter(tmp_path, model, rank=4, head=True, embedding=True)
    whole = loaded(tmp_path, spec, torch.float32).parts
    (head,), (embedding,) = whole["head"], whole["embedding"]
    assert (head.a.shape, head.b.shape, embedding.a.shape, embedding.b.shape) == ((4, 64), (199, 4), (4, 199), (64, 4))
    parts = [loaded(tmp_path, spec, torch.float32, Shard(index, 2)).parts for index in range(2)]
    assert torch.equal(torch.cat([part["head"][0].b for part in parts]), head.b)
    assert all(torch.equal(part["embedding"][0].a, embedding.a) for part in parts)
    parts = [loaded(tmp_path, spec, torch.float32, Shard(index, 2, splits_embedding=True)).parts for index in range(2)]
    assert torch.equal(torch.cat([part["embedding"][0].a for part in parts], dim=1), embedding.a)
    last = loaded(tmp_path, spec, torch.float32, Shard(0, 1, 1, 2)).parts
    assert last
    assert not last.keys() & {"head", "embedding"}


@pytest.mark.parametrize(
    ("name", "old", "new"), [("gpt2", "transformer.", ""), ("gemma3-with-images", "language_model.model.", "model.language_model.")]
)
def test_other_names_of_modules(made, tmp_path: pathlib.Path, name: str, old: str, new: str) -> None:
    """Those of models without a head, and those that transformers has now."""
    write_adapter(tmp_path, made(name))
    expected = loaded(tmp_path, load_spec(made(name)), torch.float32)
    stored = {key.replace(old, new): tensor for key, tensor in load_file(tmp_path / FILE).items()}
    save_adapter(tmp_path, stored, r=8, lora_alpha=16)
    found = loaded(tmp_path, load_spec(made(name)), torch.float32)
    assert found.parts.keys() == expected.parts.keys()


L0 = "base_model.model.model.layers.0"
Q = f"{L0}.self_attn.q_proj"
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3' in .*adapter_config.json is not supported; supported is LORA"),
    ({"peft_type": None}, "peft_type None"),
    ({"bias": "lora_only"}, "bias 'lora_only' .* supported is none"),
    ({"use_dora": True}, "use_dora True .*: DoRA is not supported"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] .*: not supported"),
    *(
        ({field: value}, f"{field} .*: not supported")
        for field, value in {
            "lora_bias": True,
            "target_parameters": ["mlp.experts.gate_up_proj"],
            "layer_replication": [[0, 2], [1, 3]],
            "trainable_token_indices": [1],
            "use_qalora": True,
            "alora_invocation_tokens": [3],
            "kasa_config": {"beta": 1},
            "use_bdlora": {"nblocks": 2},
            "arrow_config": {"top_k": 1},
            "monteclora_config": {"num_samples": 1},
            "megatron_config": {"tensor_model_parallel_size": 2},
            "something_new": 1,
        }.items()
    ),
    *(
        ({"init_lora_weights": how}, f"init_lora_weights {how!r} .*changes the weights of the model")
        for how in ("pissa", "olora", "corda", "loftq", 1)
    ),
    *(
        ({"r": rank}, rf"r {rank!r} of model.layers.0.mlp.down_proj in .* is not an integer in 1 \.\. 256")
        for rank in (0, -1, 257, True, 8.0, "8")
    ),
    *(
        ({"lora_alpha": alpha}, f"lora_alpha {re.escape(repr(alpha)[:100])}.* is not a number in")
        for alpha in ("16", None, True, float("nan"), 1e300, 10**400)
    ),
    ({"use_rslora": 1}, "use_rslora 1 .* is not true or false"),
    ({"rank_pattern": {"q_proj": 4}}, r"other shapes .*model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight \[8, 64\] instead of \[4, 64\]"),
    ({"rank_pattern": [1]}, r"rank_pattern \[1\] .* is not an object"),
    ({"alpha_pattern": {"q_(proj": 4}}, r"alpha_pattern in .* has '.*q_\(proj\)', which is not a regular expression"),
    # Python's re would not be done with the first.
    ({"rank_pattern": {"([a-z._0-9]+)+X": 5, "q_proj": 4}}, r"other shapes .*q_proj\.lora_A\.weight \[8, 64\] instead of \[4, 64\]"),
    ({"alpha_pattern": {r"(?:(q)\1)+": 4}}, "alpha_pattern in .* has .* beside groupref, which is not supported"),
]


@pytest.fixture(scope="module")
def written(made, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, ModelSpec]:
    """An adapter without faults, and the spec of its model."""
    return write_adapter(tmp_path_factory.mktemp("written"), made("mistral")), load_spec(made("mistral"))


def refuse(folder: pathlib.Path, spec: ModelSpec, message: str, **options: Any) -> None:
    with pytest.raises(AdapterError, match=message) as caught:
        loaded(folder, spec, torch.float32, **options)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_fields_are_refused(written, tmp_path: pathlib.Path, fields: dict[str, Any], message: str) -> None:
    folder, spec = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, **fields}))
    refuse(tmp_path, spec, message)


TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    ({f"{Q}.lora_A.weight": None}, r"it lacks model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight"),
    ({f"{Q}.lora_B.weight": None}, r"it lacks model\.layers\.0\.self_attn\.q_proj\.lora_B\.weight"),
    ({f"{Q}.lora_A.weight": torch.zeros(8, 63)}, r"other shapes .*lora_A\.weight \[8, 63\] instead of \[8, 64\]"),
    ({f"{Q}.lora_B.weight": torch.zeros(8, 128)}, r"other shapes .*lora_B\.weight \[8, 128\] instead of \[128, 8\]"),
    ({f"{Q}.lora_A.weight": torch.zeros(8, 64, dtype=torch.int8)}, r"dtypes other than float32.*q_proj\.lora_A\.weight int8"),
    ({f"{Q}.lora_B.weight": torch.full((128, 8), torch.nan)}, r"numbers for layers\.0\.qkv\.weight that are not finite in float32"),
    ({f"{Q}.lora_A.weight": torch.full((8, 64), torch.inf)}, "not finite"),
    ({f"{Q}.lora_magnitude_vector": torch.zeros(128)}, "it has unexpected .*lora_magnitude_vector"),
    ({f"{Q}.lora_B.bias": torch.zeros(128)}, "it has unexpected .*lora_B.bias"),
    ({f"{Q}.lora_embedding_A": torch.zeros(8, 64)}, "it has unexpected .*lora_embedding_A"),
    ({f"{Q}.base_layer.weight": torch.zeros(128, 64)}, "it has unexpected .*base_layer.weight"),
    ({"base_model.model.lm_head.weight": torch.zeros(199, 64)}, "it has unexpected base_model.model.lm_head.weight"),
    ({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}, "it has unexpected model.layers.0"),
    *(
        ({f"{module}.lora_A.weight": torch.zeros(8, 64), f"{module}.lora_B.weight": torch.zeros(64, 8)}, message)
        for module, message in {
            "base_model.model.model.layers.3.self_attn.o_proj": "it has unexpected model.layers.3.self_attn.o_proj",
            "base_model.model.layers.0.self_attn.q_proj": "it has unexpected (model.)?layers.0.self_attn.q_proj",  # a second time
            f"{L0}.input_layernorm": "it has unexpected .*input_layernorm",
        }.items()
    ),
    (
        {"base_model.model.lm_head.base_layer.weight": torch.zeros(200, 64)},
        "it lacks lm_head.lora_A.weight.*other shapes .*lm_head.base_layer",
    ),
]


@pytest.mark.parametrize(("tensors", "message"), TENSORS)
def test_tensors_are_refused(written, tmp_path: pathlib.Path, tensors: dict[str, Tensor | None], message: str) -> None:
    folder, spec = written
    stored = {name: tensor for name, tensor in {**load_file(folder / FILE), **tensors}.items() if tensor is not None}
    shutil.copy(folder / CONFIG, tmp_path)
    save_file(stored, tmp_path / FILE)
    refuse(tmp_path, spec, message)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("deepseek-v3", "model.layers.0.self_attn.kv_b_proj"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w1"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate"),
        ("qwen2-moe", "model.layers.0.mlp.shared_expert_gate"),
        ("gpt2", "transformer.wpe"),
    ],
)
def test_matrices_that_cannot_have_adapters(made, tmp_path: pathlib.Path, name: str, module: str) -> None:
    tensors = {f"base_model.model.{module}.lora_{half}.weight": torch.zeros(1, 1) for half in "AB"}
    save_adapter(tmp_path, tensors, r=1)
    refuse(tmp_path, load_spec(made(name)), f"changes what an adapter cannot .*{re.escape(module)}")


def test_broken_files(written, tmp_path: pathlib.Path) -> None:
    folder, spec = written
    refuse(tmp_path / "nothing", spec, "there is no directory")
    refuse(tmp_path, spec, "cannot read .*adapter_config.json: No such file")
    for text, message in (
        ("{", "is not valid JSON"),
        ("[1]", "does not hold a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
        (" " * (1 << 21), "has more than 1048576 bytes"),
    ):
        (tmp_path / CONFIG).write_text(text)
        refuse(tmp_path, spec, message)
    shutil.copy(folder / CONFIG, tmp_path)
    refuse(tmp_path, spec, r"there is no adapter_model\.safetensors in .*")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    refuse(tmp_path, spec, r"adapter_model\.bin is not read: save it with safe_serialization=True")
    stored = (folder / FILE).read_bytes()
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    lie = json.dumps({**header, f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}).encode()
    for content in (b"", stored[:100], stored[:-1], b"\xff" * 8 + stored[8:], len(lie).to_bytes(8, "little") + lie + stored[-1000:]):
        (tmp_path / FILE).write_bytes(content)
        refuse(tmp_path, spec, "is not a safetensors file, or corrupt or truncated")
    save_file({}, tmp_path / FILE)
    refuse(tmp_path, spec, "does not fit the model: it has no tensors")


def test_the_largest_rank(written) -> None:
    folder, spec = written
    refuse(folder, spec, r"r 8 of .* is not an integer in 1 \.\. 7", max_rank=7)
    assert loaded(folder, spec, torch.float32, max_rank=8).low_rank == 8


def test_models_in_the_code_of_transformers(made, written) -> None:
    with pytest.raises(AdapterError, match="MistralForCausalLM runs in the code of transformers, where adapters are not supported"):
        loaded(written[0], find_spec(made("mistral"), "transformers"), torch.float32)
