"""Which method for which problem: ten small bilevel problems, nine methods, one optimizer of λ."""
