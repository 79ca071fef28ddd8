"""One model over several ranks: what a rank holds, and how ranks start, talk, and notice that another one is gone."""
