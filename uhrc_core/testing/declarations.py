"""RecurrentDeclarationConformance: what a backend says of itself, checked without jax."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from uhrc_core.boundary import mistake_in
from uhrc_core.registry.hf_config import text_config
from uhrc_core.registry.recurrent import RecurrentBackendSpec, RecurrentModel
from uhrc_core.registry.tables import ConfigTable

#: Models of others; those of a suite's own model types are left out.
FOREIGN_CONFIGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"model_type": None, "text_config": None},
    {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64},
    {"model_type": "gpt_oss", "num_hidden_layers": 2, "sliding_window": 128},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 6}},
    {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    },
    {"model_type": "qwen3_next", "num_hidden_layers": 4, "linear_num_value_heads": 4},
    {
        "model_type": "minimax",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
    },
    {"model_type": "somebody_elses_hybrid", "num_hidden_layers": 2, "layer_types": ["state"] * 2},
)


class RecurrentDeclarationConformance(ABC):
    """The spec of a recurrent backend and the models it claims.

    Attributes:
        spec: the backend under test.
        params: sizes of one layer, an instance of ``spec.params_model``.
        hf_configs: ``config.json`` contents that ``spec.matches_hf_config`` must know.
    """

    spec: RecurrentBackendSpec
    params: ConfigTable
    hf_configs: Sequence[Mapping[str, Any]] = ()

    def test_the_spec_is_sound(self) -> None:
        """Types of all fields, a layout with distinct names, params that are all ints."""
        mistake = mistake_in(self.spec, RecurrentBackendSpec)
        assert mistake is None, f"spec: {mistake}"
        _check_params("params", self.params, self.spec)
        names = [buffer.name for buffer in self.spec.state_layout(self.params).buffers]
        assert len(set(names)) == len(names), f"state_layout: two buffers share a name: {names}"

    def test_its_own_models_are_recognised(self) -> None:
        """Each of ``hf_configs`` gives a model whose params round-trip through a dump."""
        example = {"model_type": self.spec.name, "num_hidden_layers": 4, **self.params.model_dump()}
        assert self.hf_configs, (
            "hf_configs is missing: give the suite the contents of one config.json or more that "
            f"matches_hf_config must know, such as hf_configs = ({example},)"
        )
        for config in self.hf_configs:
            model = self._ask(config)
            which = f"model_type {config.get('model_type')!r}"
            assert model is not None, f"matches_hf_config: {which} was answered with None"
            mistake = mistake_in(model, RecurrentModel)
            assert mistake is None, f"matches_hf_config: {which}: {mistake}"
            _check_params(f"matches_hf_config: {which}: params", model.params, self.spec)
            layers = model.linear_layers
            assert layers, f"{which}: no recurrent layer; answer None for such a model"
            assert list(layers) == sorted(set(layers)), f"{which}: layers not ascending: {layers}"
            within = layers[0] >= 0 and layers[-1] < model.num_layers
            assert within, f"{which}: layers {layers} of a model of {model.num_layers}"

    def test_models_of_others_are_left_alone(self) -> None:
        """A config without layers of this backend is answered with None, and not with an error."""
        own = {text_config(config).get("model_type") for config in self.hf_configs}
        for config in FOREIGN_CONFIGS:
            model_type = text_config(config).get("model_type")
            if model_type is None or model_type not in own:
                answer = self._ask(config)
                assert answer is None, f"matches_hf_config claims a foreign model: {config!r}"

    def _ask(self, config: Mapping[str, Any]) -> RecurrentModel | None:
        before = deepcopy(config)
        answer = self.spec.matches_hf_config(config)
        assert config == before, "matches_hf_config changed the config it was asked about"
        return answer


def _check_params(what: str, params: ConfigTable, spec: RecurrentBackendSpec) -> None:
    kind = spec.params_model
    assert isinstance(params, kind), f"{what}: {params!r} is no {kind.__name__}"
    dump = params.model_dump()
    wrong = {key: value for key, value in dump.items() if type(value) is not int}
    assert not wrong, f"{what}: every field must be an int, got {wrong}"
    again = kind(**dump)
    assert again == params, f"{what}: {kind.__name__}(**dump) is {again!r}, not {params!r}"
