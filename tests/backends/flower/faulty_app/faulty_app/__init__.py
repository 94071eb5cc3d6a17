"""An app whose nodes fail on purpose."""
