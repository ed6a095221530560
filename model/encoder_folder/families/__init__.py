"""The families of text encoders, by the `model_type` of their configurations. To add one, list it here."""

from collections.abc import Mapping
from typing import Final

from attention_serving.model.encoder_folder.families.bert import BERT, DISTILBERT, MPNET, ROBERTA
from attention_serving.model.encoder_folder.families.clip import CLIP
from attention_serving.model.encoder_folder.families.decoder import DECODER
from attention_serving.model.encoder_folder.families.family import Family
from attention_serving.model.encoder_folder.families.modernbert import MODERNBERT

FAMILIES: Final[Mapping[str, Family]] = {
    model_type: family
    for family in (BERT, CLIP, DECODER, DISTILBERT, MODERNBERT, MPNET, ROBERTA)
    for model_type in family.model_types
}
