"""Codecs: how are floats written as bytes?"""

from fedbcgd.codecs.codec import Codec
from fedbcgd.codecs.plain import Plain
from fedbcgd.codecs.qsgd import QSGD
from fedbcgd.parts import Registry

CODECS: Registry[Codec] = Registry("codec")
CODECS.add("plain", Plain)
CODECS.add("qsgd", QSGD)

__all__ = ["CODECS", "QSGD", "Codec", "Plain"]
