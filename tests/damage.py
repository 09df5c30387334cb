"""Ways in which a checkpoint can be damaged, each with what its error says."""

import json
import os
import pickle

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


class Trap:
    """Makes a directory where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def truncate(directory):
    file = directory / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])


def break_header(directory):
    file = directory / WEIGHTS
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"{{{" + data[11:])


def empty_weights(directory):
    (directory / WEIGHTS).write_bytes(b"")


def name_missing_shards(directory):
    (directory / WEIGHTS).rename(directory / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write("model.safetensors.index.json", {"weight_map": shards})(directory)


def name_outside_shards(directory):
    write("model.safetensors.index.json", {"weight_map": {"a": "../../secret.safetensors"}})(directory)


def pickle_weights(directory):
    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(), protocol=2))


def drop_tensor(directory):
    tensors = load_file(directory / WEIGHTS)
    tensors.pop("model.norm.weight")
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def as_integers(directory):
    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].char()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def empty(directory):
    for file in directory.iterdir():
        file.unlink()


def remove(*names):
    def change(directory):
        for name in names:
            (directory / name).unlink(missing_ok=True)

    return change


def write(name, value):
    def change(directory):
        text = value if isinstance(value, str) else json.dumps(value)
        (directory / name).write_text(text, encoding="utf-8")

    return change


def set_config(**fields):
    def change(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


# name: (damage, what the error says)
DAMAGES = {
    "truncated weights": (truncate, r"model\.safetensors is damaged or truncated"),
    "broken header": (break_header, r"model\.safetensors is damaged or truncated"),
    "empty weights": (empty_weights, r"model\.safetensors is damaged or truncated"),
    "missing shards": (name_missing_shards, r"1 of 2 weight files are missing, such as model-00002-of-00002"),
    "shards outside": (name_outside_shards, r"secret\.safetensors', which is no file of this directory"),
    "index is a list": (write("model.safetensors.index.json", []), r"index\.json holds a JSON list"),
    "index without map": (write("model.safetensors.index.json", {}), r"index\.json has no weight_map"),
    "pickled weights": (pickle_weights, r"pickled \(pytorch_model\.bin\), and nothing is unpickled here"),
    "no weights": (remove(WEIGHTS), r"no weights; model\.safetensors is missing"),
    "missing tensor": (drop_tensor, r"incomplete .*, 1 of \d+ tensors are missing, such as model\.norm"),
    "integer weights": (as_integers, r"model\.norm\.weight has the type I8"),
    "config is a list": (write("config.json", [1]), r"config\.json holds a JSON list, not an object"),
    "config is no JSON": (write("config.json", "{"), r"config\.json is damaged, not JSON"),
    "nested config": (write("config.json", "[" * 100_000), r"config\.json is damaged, not JSON"),
    "no config": (remove("config.json"), r"no config\.json"),
    "wrong hidden_size": (set_config(hidden_size=48), r"mismatched shapes"),
    "hidden_size is a word": (set_config(hidden_size="large"), r"cannot be loaded: .*hidden_size"),
    "no heads": (set_config(num_attention_heads=0), r"cannot be loaded"),
    "too many layers": (set_config(num_hidden_layers=10**9, layer_types=None), r"says 1000000000 layers"),
    "unknown model type": (set_config(model_type="gpt2"), r"architecture 'gpt2' is not supported"),
    "model type is a list": (set_config(model_type=["qwen2"]), r"is not supported"),
    "quantised": (set_config(quantization_config={"quant_method": "gptq"}), r"weights are quantised"),
    "broken tokenizer": (write("tokenizer.json", "{"), r"tokenizer\.json is damaged, not JSON"),
    "tokenizer of nothing": (write("tokenizer.json", {"model": 1}), r"tokenizer\.json is a int"),
    "broken settings": (write("tokenizer_config.json", []), r"tokenizer_config\.json holds a JSON list"),
    "no tokenizer": (remove("tokenizer.json"), r"no tokenizer there"),
    "broken template": (
        write("chat_template.jinja", "{% for m in messages %}\n{{ m.role }"),
        r"the chat template is damaged, line 2: ",
    ),
    "empty directory": (empty, r"an empty directory"),
}  # fmt: skip
