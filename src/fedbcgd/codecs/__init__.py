"""Codecs: how are floats written as bytes?"""

from fedbcgd.codecs.codec import Codec
from fedbcgd.codecs.half import Half
from fedbcgd.codecs.plain import Plain
from fedbcgd.codecs.qsgd import QSGD
from fedbcgd.codecs.topk import TopK
from fedbcgd.parts import Registry

CODECS: Registry[Codec] = Registry("codec")
CODECS.add("plain", Plain)
CODECS.add("float16", Half)
CODECS.add("qsgd", QSGD)
CODECS.add("topk", TopK)

__all__ = ["CODECS", "QSGD", "Codec", "Half", "Plain", "TopK"]
