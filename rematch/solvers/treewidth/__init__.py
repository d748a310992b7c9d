"""TWRemat and PWRemat (Kumar et al., NeurIPS 2019), and the tree and path decompositions they recurse on."""
