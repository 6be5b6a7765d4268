use super::super::SimDevice;
use super::*;

fn taped() -> (Taped, DevicePtr, DevicePtr) {
    let mut device = Taped::new(Box::new(SimDevice::new(ptx::Limits::GB10, 1)));
    let (a, b) = (device.allocate(4).unwrap(), device.allocate(4).unwrap());
    device.fill(a, 0, 4).unwrap();
    device.fill(b, 0, 4).unwrap();
    (device, a, b)
}

fn read(device: &mut Taped, from: DevicePtr) -> [u8; 4] {
    let mut out = [0; 4];
    device.download(from, &mut out).unwrap();
    out
}

#[test]
fn taped_operations_run_when_the_tape_is_played() {
    let (mut device, a, b) = taped();
    device.start_tape();
    device.fill(a, 7, 4).unwrap();
    device.copy(a, b, 4).unwrap();
    let tape = device.take_tape().unwrap();
    assert_eq!(tape, [Entry::Fill { to: a, value: 7, bytes: 4 }, Entry::Copy { from: a, to: b, bytes: 4 }]);
    assert_eq!(read(&mut device, b), [0; 4]);
    let graph = device.graph_of(&tape).unwrap();
    assert_eq!(read(&mut device, b), [0; 4]);
    device.replay(graph).unwrap();
    assert_eq!(read(&mut device, b), [7; 4]);
    device.forget(graph);
    assert!(device.replay(graph).is_err());
}

#[test]
fn an_operation_that_cannot_be_taped_ends_the_tape_in_order() {
    let (mut device, a, b) = taped();
    device.start_tape();
    device.fill(a, 1, 4).unwrap();
    device.copy(a, b, 4).unwrap();
    device.upload(a, &[9; 4]).unwrap();
    assert_eq!(device.take_tape(), None);
    assert_eq!((read(&mut device, a), read(&mut device, b)), ([9; 4], [1; 4]));
    device.start_tape();
    device.copy(a, b, 4).unwrap();
    device.free(a).unwrap();
    assert_eq!(device.take_tape(), None);
    assert_eq!(read(&mut device, b), [9; 4]);
    assert_eq!(device.frees(), 1);
}

/// If the device ran what it recorded, the step would run twice.
#[test]
fn a_failed_recording_leaves_the_device_not_recording() {
    let (mut device, a, b) = taped();
    device.free(a).unwrap();
    let graph = device.graph_of(&[Entry::Copy { from: a, to: b, bytes: 4 }]).unwrap();
    assert!(device.replay(graph).unwrap_err().to_string().contains("freed"));
    assert_eq!(read(&mut device, b), [0; 4]);
}
