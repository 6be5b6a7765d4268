//! Samples of messages about images that other workers encode.

use proto::ids::{Epoch, ModelId, NodeId};
use proto::message::image_encoder::*;

const CLASS: &str = "tower/cpu/avx2/f32";

pub(crate) fn encoders() -> Vec<ImageEncoderSource> {
    let node = NodeId::new("w9").unwrap();
    vec![ImageEncoderSource { node, quic: "10.0.0.9:7001".into(), numeric_class: CLASS.into() }]
}

pub(crate) fn image_to_encode() -> EncodeImage {
    EncodeImage { model_digest: [1; 32], digest: [4; 32], rows: 300, file: b"GIF89a".to_vec().into() }
}

pub(crate) fn image_head() -> EncodedImageHead {
    EncodedImageHead { rows: 3, width: 300, deepstack: 2, grid: Some([1, 1, 3]) }
}

pub(crate) fn image_refusals() -> Vec<EncodeImageRefusal> {
    vec![
        EncodeImageRefusal::OtherModel,
        EncodeImageRefusal::Draining,
        EncodeImageRefusal::Busy,
        EncodeImageRefusal::BadImage { reason: "it is no image".into() },
        EncodeImageRefusal::Internal,
    ]
}

pub(super) fn image_frames() -> Vec<EncodeImageFrame> {
    vec![
        EncodeImageFrame::Working,
        EncodeImageFrame::Encoded(image_head()),
        EncodeImageFrame::Failed(EncodeImageRefusal::Busy),
    ]
}

pub(super) fn encoder_report() -> EncoderReport {
    let model = ModelId::new("m").unwrap();
    let tower = OfferedTower { model, model_digest: [1; 32], numeric_class: CLASS.into() };
    EncoderReport { epoch: Epoch(70_000), tower }
}
