"""Weights from directories that transformers wrote, and from models in memory."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import decoder_references
from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM
from causal_qwen.decoder import from_hf, load_directory
from decoder_references import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([[1, 5, 2, 40, 7]])


SMALL = {
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
}


def reference(family="qwen2", **changes):
    return decoder_references.reference(family, **(SMALL | changes))


@pytest.fixture
def directory(tmp_path):
    reference().save_pretrained(tmp_path)
    return tmp_path


def edit_tensors(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def assert_same(ours, theirs):
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"], ids=["one file", "shards"])
def test_directories_load(family, tied, shard, tmp_path):
    theirs = reference(family, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "5GB")
    ours = load_directory(tmp_path)
    assert_same(ours, theirs)
    assert ours.config.tie_word_embeddings is tied
    assert not ours.training


def test_loaded_weights_have_the_dtype_asked_for_and_can_be_trained(tmp_path):
    reference().to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in load_directory(tmp_path).parameters()} == {torch.float32}
    half = load_directory(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad and p.device.type == "cpu" for p in half.parameters())


def test_copies_do_not_share_memory():
    theirs = reference()
    ours = from_hf(theirs)
    before = ours(IDS).logits
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    torch.testing.assert_close(ours(IDS).logits, before, rtol=0, atol=0)


def causal_reference(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return CausalQwen2ForCausalLM(
        CausalQwen2Config(**(sizes | heads | {"num_token_id": 60} | changes))
    ).eval()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_causal_qwen_directory_gives_its_backbone_and_head(tied, tmp_path):
    theirs = causal_reference(tie_word_embeddings=tied)
    with torch.no_grad():  # heads that a plain decoder must not notice
        for parameter in [*theirs.abduction.parameters(), *theirs.action.parameters()]:
            parameter.add_(torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    ours = load_directory(tmp_path)
    with torch.no_grad():
        hidden = theirs.model(IDS).last_hidden_state
        expected = F.linear(hidden, theirs.get_output_embeddings().weight)
        torch.testing.assert_close(ours.hidden(IDS), hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_head_over_fewer_causes_is_refused(tmp_path):
    causal_reference(causal_size=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the head reads 16 causes"):
        load_directory(tmp_path)


def test_computed_tensors_of_old_llama_checkpoints_are_left_alone(tmp_path):
    theirs = reference("llama")
    theirs.save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    assert_same(load_directory(tmp_path), theirs)


def test_a_head_that_differs_from_the_embedding_is_kept_whatever_the_config_says(tmp_path):
    theirs = reference(tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    ours = load_directory(tmp_path)
    assert not ours.config.tie_word_embeddings
    assert_same(ours, theirs)


def test_missing_tensors_are_named(directory):
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_directory(directory)


def test_a_missing_norm_of_queries_is_named(tmp_path):
    reference("qwen3").save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.0.self_attn.q_norm.weight"))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_directory(tmp_path)


def test_an_untied_head_that_is_missing_is_named(directory):
    edit_tensors(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_directory(directory)


def test_tensors_without_a_place_are_named(directory):
    edit_tensors(
        directory, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    )
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_directory(directory)


def test_tensors_of_another_shape_are_named(directory):
    edit_config(directory, vocab_size=62)
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens\.weight has shape \(61, 32\), the config says \(62, 32\)"
    ):
        load_directory(directory)


def test_quantised_tensors_are_refused(directory):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(
        ValueError, match=r"up_proj\.weight is torch\.int8: give the checkpoint before quantisation"
    ):
        load_directory(directory)


def test_a_directory_without_a_checkpoint_says_what_is_missing(directory, tmp_path_factory):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_directory(tmp_path_factory.mktemp("empty"))
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_directory(directory)


def test_a_missing_shard_is_named(tmp_path):
    reference().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        load_directory(tmp_path)
