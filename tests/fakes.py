"""Stand-ins shared by the tests: a character-level tokenizer and a scripted inference engine.

Both are real in the way that matters: the tokenizer obeys the tokenizer interface the library
uses, the engine speaks HTTP on a loopback port.
"""

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
