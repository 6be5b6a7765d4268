//! Lease of a stage by the first stage of a replica: one claim, then heartbeats with replies. Layers and
//! steps have their own streams, which end with the lease.

use super::streams::{FrameReader, FrameWriter, StreamCode};
use crate::Error;
use proto::codec::Cap;
use proto::placement::{ClaimRefusal, LeaseAnswer, LeaseBeat, StageClaim};
use quinn::{RecvStream, SendStream};

/// First stage's end of a granted lease. Dropping it releases the stage.
#[derive(Debug)]
pub struct StageLease {
    beats: FrameWriter<LeaseBeat>,
    answers: FrameReader<LeaseAnswer>,
    sent: u64,
}

impl StageLease {
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        claim: &StageClaim,
    ) -> Result<Self, Error> {
        let mut head = FrameWriter::new(send, Cap::Stream);
        head.write(claim).await?;
        let mut lease = Self {
            beats: head.retyped(Cap::Stream),
            answers: FrameReader::new(receive, Cap::Stream),
            sent: 0,
        };
        match lease.answer().await? {
            LeaseAnswer::Granted => Ok(lease),
            LeaseAnswer::Refused(refusal) => Err(Error::StageClaimed(refusal)),
            LeaseAnswer::Beat(_) => Err(Error::Protocol("a lease's beat before its grant")),
        }
    }

    /// Sends a heartbeat and waits for the reply. Fails if the stage has ended the lease.
    pub async fn beat(&mut self) -> Result<(), Error> {
        self.sent += 1;
        self.beats.write(&LeaseBeat::Beat(self.sent)).await?;
        match self.answer().await? {
            LeaseAnswer::Beat(number) if number == self.sent => Ok(()),
            _ => Err(Error::Protocol("a lease's beat is not answered by a beat")),
        }
    }

    async fn answer(&mut self) -> Result<LeaseAnswer, Error> {
        self.answers.next().await?.ok_or(Error::StreamCut { what: "a lease" })
    }
}

/// An incoming claim.
#[derive(Debug)]
pub struct LeaseCall {
    pub claim: StageClaim,
    beats: FrameReader<LeaseBeat>,
    answers: FrameWriter<LeaseAnswer>,
}

impl LeaseCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let answers = FrameWriter::new(send, Cap::Stream);
        let mut head = FrameReader::new(receive, Cap::Stream);
        match head.next().await {
            Ok(Some(claim)) => Ok(Self { claim, beats: head.retyped(Cap::Stream), answers }),
            Ok(None) => Err(Error::StreamCut { what: "a claim" }),
            Err(error) => {
                head.stop(StreamCode::Malformed);
                Err(error)
            }
        }
    }

    pub async fn grant(mut self) -> Result<LeaseHeld, Error> {
        self.answers.write(&LeaseAnswer::Granted).await?;
        Ok(LeaseHeld { beats: self.beats, answers: self.answers })
    }

    /// Refuses the claim.
    pub async fn refuse(mut self, refusal: ClaimRefusal) -> Result<(), Error> {
        self.answers.write(&LeaseAnswer::Refused(refusal)).await?;
        self.answers.finish();
        Ok(())
    }
}

/// Claimed stage's end. Dropping it ends the lease.
#[derive(Debug)]
pub struct LeaseHeld {
    beats: FrameReader<LeaseBeat>,
    answers: FrameWriter<LeaseAnswer>,
}

impl LeaseHeld {
    /// Waits for the next heartbeat and replies to it. Fails if the first stage has ended the lease or is
    /// lost.
    pub async fn beat(&mut self) -> Result<(), Error> {
        let LeaseBeat::Beat(number) =
            self.beats.next().await?.ok_or(Error::StreamCut { what: "a lease's beats" })?;
        self.answers.write(&LeaseAnswer::Beat(number)).await
    }
}
