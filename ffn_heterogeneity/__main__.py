"""`python -m ffn_heterogeneity` is `ffnh`."""

from ffn_heterogeneity.launch.ffnh import main

if __name__ == "__main__":
    main()
