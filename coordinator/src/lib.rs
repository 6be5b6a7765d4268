//! skeleton
pub mod prefix_index;
pub mod slot;
pub mod routing;
pub mod admission; pub mod table;
pub mod balancer;
