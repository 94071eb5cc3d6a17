"""Codecs: how are floats written as bytes?"""

from fedbcgd.algorithms.codecs.half import Half
from fedbcgd.algorithms.codecs.plain import Plain
from fedbcgd.algorithms.codecs.qsgd import QSGD
from fedbcgd.algorithms.codecs.topk import TopK
from fedbcgd.core.codec import Codec
from fedbcgd.core.parts import Registry

CODECS: Registry[Codec] = Registry("codec")
CODECS.add("plain", Plain)
CODECS.add("float16", Half)
CODECS.add("qsgd", QSGD)
CODECS.add("topk", TopK)

__all__ = ["CODECS", "QSGD", "Codec", "Half", "Plain", "TopK"]
