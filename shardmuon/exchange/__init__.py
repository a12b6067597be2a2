"""From DTensors to blocks, and the only collectives: how the planned exchange is carried out."""
