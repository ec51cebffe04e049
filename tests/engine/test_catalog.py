"""The catalog: every model is what its public config.json says."""

import pytest
from shared import CONFIGS

from memcalc.config import catalog, load
from memcalc.config.readers import huggingface

# The facts of the public config.json files, under their own names, of all but the paper's models.
PAPER = ("22b", "175b", "530b", "1t")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_config_is_read_as_the_catalogues_model(name):
    read, entry = huggingface.read(CONFIGS[name], name), load(name)
    assert read.model.facts() | {"source": ""} == entry.model.facts() | {"source": ""}
    assert set(entry.unmodelled) <= set(read.unmodelled)


def test_every_model_has_a_public_config_a_source_and_its_ends():
    assert sorted((*CONFIGS, *PAPER)) == catalog.names()
    assert len(catalog.names()) >= 40
    for source in catalog.entries():
        assert source.model.source
        assert source.model.vocab_size or source.model.classes
        assert source.model.max_seq_length


def test_a_model_is_found_by_its_other_names_too():
    for alias, name in catalog.ALIASES.items():
        assert load(alias) == load(alias.upper()) == load(name)
        assert alias not in catalog.names()
