"""Our environments as servers of other ecosystems' protocols, one page per protocol."""
