"""Where J_in and J_out are evaluated, and the promise that looking at them changes nothing."""
