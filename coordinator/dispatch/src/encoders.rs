//! Workers that encode images for other workers.

use super::{Dispatch, SessionId};
use proto::ids::NodeId;
use proto::message::image_encoder::{EncoderReport, ImageEncoderSource, MAX_IMAGE_ENCODERS, OfferedTower};
use router::balancer::Availability;
use std::time::Instant;

impl Dispatch {
    /// Takes a worker's report that it encodes images. Ignored unless the worker is a member with this session and
    /// epoch.
    pub fn set_encoder(&self, session: SessionId, node: &NodeId, report: EncoderReport) {
        let state = self.state.lock();
        let link = state.links.get(node);
        if let Some(link) = link.filter(|link| link.session() == session && link.epoch() == report.epoch) {
            link.set_tower(report.tower);
        }
    }

    /// The workers that encode images, with the towers that they have.
    pub fn encoders(&self) -> Vec<(NodeId, OfferedTower)> {
        let state = self.state.lock();
        state.links.iter().filter_map(|(node, link)| Some((node.clone(), link.tower()?))).collect()
    }

    /// The encoders that have the tower of a model that `node` serves and take work now, by name. Those that are silent
    /// are among them only if all are.
    pub(super) fn encoders_for(&self, node: &NodeId) -> Vec<ImageEncoderSource> {
        let (state, now) = (self.state.lock(), Instant::now());
        let Some(member) = state.balancer.table().member(node) else { return Vec::new() };
        let serves =
            |digest: [u8; 32]| member.register.models.iter().any(|model| model.model_digest == digest);
        let sources = state.links.iter().filter_map(|(node, link)| {
            let tower = link.tower().filter(|tower| serves(tower.model_digest))?;
            let (node, quic) = (node.clone(), link.quic().to_owned());
            let availability = state.balancer.availability(now, &node);
            Some((availability, ImageEncoderSource { node, quic, numeric_class: tower.numeric_class }))
        });
        let sources: Vec<_> = sources.collect();
        let best = sources.iter().map(|(availability, _)| *availability).max();
        let best = best.filter(|best| *best > Availability::Away);
        let best = sources.into_iter().filter(|(availability, _)| Some(*availability) == best);
        let mut best: Vec<ImageEncoderSource> = best.map(|(_, source)| source).collect();
        best.sort_by(|a, b| a.node.cmp(&b.node));
        best.truncate(MAX_IMAGE_ENCODERS);
        best
    }
}
