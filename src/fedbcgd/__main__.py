"""python -m fedbcgd"""

from fedbcgd.cli import main

main()
