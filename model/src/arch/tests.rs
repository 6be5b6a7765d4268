mod encoders;
mod fixtures;
mod hybrids;
mod refused;
mod refused_fixtures;
mod variants;
mod windowed;
