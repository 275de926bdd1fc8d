"""A character-level tokenizer and scripted inference engines, shared by the tests."""

from tests.char_tokenizer import CharTokenizer
from tests.scripted_dialects import ScriptedSGLang, ScriptedTrl
from tests.scripted_engine import Fault, RecordedRequest, ScriptedEngine, logprob_of

__all__ = [
    "CharTokenizer",
    "Fault",
    "RecordedRequest",
    "ScriptedEngine",
    "ScriptedSGLang",
    "ScriptedTrl",
    "logprob_of",
]
