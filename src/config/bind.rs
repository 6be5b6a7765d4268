//! Listen addresses in settings: an address, or a network such as `192.168.100.0/24:7000`, which selects this
//! host's address in that network. With a network, several hosts can use the same file.

use super::ConfigError;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::str::FromStr;

/// An address and port, or a network and port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bind {
    Address(SocketAddr),
    /// This host's address in the network, and a port.
    Network(Network, u16),
}

/// A network in CIDR notation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Network {
    address: IpAddr,
    bits: u32,
}

/// Error of a text that is not a valid [`Bind`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is neither an address such as 10.0.0.1:7000 nor a network such as 10.0.0.0/24:7000")]
pub(crate) struct InvalidBind(String);

impl Bind {
    /// The socket address; a network is resolved to this host's address in it. `field` is the setting's name.
    pub(crate) fn address(self, field: &'static str) -> Result<SocketAddr, ConfigError> {
        match self {
            Self::Address(address) => Ok(address),
            Self::Network(network, port) => {
                let here = network.own_address().ok_or_else(|| {
                    ConfigError::field(field, self, "this host has no address in that network")
                })?;
                Ok(SocketAddr::new(here, port))
            }
        }
    }
}

impl Network {
    /// This host's source address for the network, if it lies in the network.
    fn own_address(self) -> Option<IpAddr> {
        let (everywhere, other) = match self.address {
            IpAddr::V4(base) => {
                (Ipv4Addr::UNSPECIFIED.into(), IpAddr::from(Ipv4Addr::from_bits(base.to_bits() | 1)))
            }
            IpAddr::V6(base) => {
                (IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv6Addr::from_bits(base.to_bits() | 1).into())
            }
        };
        // Connecting a UDP socket sends nothing; the kernel only selects a route.
        let socket = UdpSocket::bind((everywhere, 0)).ok()?;
        socket.connect((other, 9)).ok()?;
        let own = socket.local_addr().ok()?.ip();
        self.contains(own).then_some(own)
    }

    fn contains(self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(base), IpAddr::V4(other)) => {
                (base.to_bits() ^ other.to_bits()).checked_shr(32 - self.bits).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(other)) => {
                (base.to_bits() ^ other.to_bits()).checked_shr(128 - self.bits).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// Parses a listen address, given as IP address or host name with a port: `localhost:8080`. If a name has
/// several addresses, prefers the first IPv4 one, because some clients do not try IPv6.
pub(crate) fn listen(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let wrong = |why: &str| format!("{text:?} is neither an address nor a host name with a port: {why}");
    // Not resolved: a resolver may be slow to report that there is no such host.
    if text.contains('/')
        || text.rsplit_once(':').is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err())
    {
        return Err(wrong("expected ADDR:PORT, such as 127.0.0.1:8080 or localhost:8080"));
    }
    let found: Vec<SocketAddr> = text.to_socket_addrs().map_err(|error| wrong(&error.to_string()))?.collect();
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| wrong("the name has no address"))
}

/// [`listen`] for a setting in a file.
pub(crate) fn listen_in_file<'de, D: Deserializer<'de>>(file: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = Option::<String>::deserialize(file)?;
    text.map(|text| listen(&text).map_err(de::Error::custom)).transpose()
}

impl From<SocketAddr> for Bind {
    fn from(address: SocketAddr) -> Self {
        Self::Address(address)
    }
}

impl FromStr for Bind {
    type Err = InvalidBind;

    fn from_str(text: &str) -> Result<Self, InvalidBind> {
        if let Ok(address) = listen(text) {
            return Ok(Self::Address(address));
        }
        let network = text.rsplit_once(':').and_then(|(network, port)| {
            let (address, bits) = network.split_once('/')?;
            let (address, bits) = (address.parse::<IpAddr>().ok()?, bits.parse::<u32>().ok()?);
            let max_bits = if address.is_ipv4() { 32 } else { 128 };
            (bits <= max_bits).then_some(Self::Network(Network { address, bits }, port.parse().ok()?))
        });
        network.ok_or_else(|| InvalidBind(text.chars().take(64).collect()))
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Network(Network { address, bits }, port) => write!(f, "{address}/{bits}:{port}"),
        }
    }
}

impl Serialize for Bind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(text: &str) -> Bind {
        text.parse().unwrap()
    }

    #[test]
    fn host_names_are_looked_up_and_ipv4_goes_first() {
        assert_eq!(listen("localhost:8080").unwrap(), "127.0.0.1:8080".parse().unwrap());
        assert_eq!(listen("[::1]:0").unwrap(), "[::1]:0".parse().unwrap());
        assert_eq!("localhost:7".parse::<Bind>().unwrap(), Bind::Address("127.0.0.1:7".parse().unwrap()));
        for wrong in [
            "",
            "localhost",
            "localhost:",
            ":8080",
            "localhost:99999",
            "no such host:1",
            "http://localhost:1",
        ] {
            let error = listen(wrong).unwrap_err();
            assert!(error.contains(&format!("{wrong:?}")) && error.contains("host name"), "{error}");
        }
        #[derive(Deserialize)]
        struct File {
            #[serde(default, deserialize_with = "listen_in_file")]
            http: Option<SocketAddr>,
        }
        let read = |text: &str| toml::from_str::<File>(text).map(|file| file.http);
        assert_eq!(read("http = \"localhost:1\"").unwrap(), "127.0.0.1:1".parse().ok());
        assert_eq!(read("").unwrap(), None);
        assert!(read("http = \"nowhere\"").unwrap_err().to_string().contains("nowhere"));
    }

    #[test]
    fn addresses_and_networks_are_read_and_printed() {
        for text in ["127.0.0.1:7000", "[::1]:7000", "10.0.0.0/24:7000", "fd00::/64:0", "0.0.0.0/0:1"] {
            assert_eq!(bind(text).to_string(), text);
        }
        for text in ["", "10.0.0.1", "10.0.0.0/33:7000", "10.0.0.0/24", "10.0.0/24:1", "eth0:7000", "a/8:1"] {
            assert!(text.parse::<Bind>().unwrap_err().to_string().contains(text), "{text}");
        }
    }

    #[test]
    fn a_network_means_the_address_of_this_host_there() {
        let here = bind("127.0.0.0/8:7000").address("quic").unwrap();
        assert_eq!(here, "127.0.0.1:7000".parse().unwrap());
        assert_eq!(bind("127.0.0.1:7").address("quic").unwrap(), "127.0.0.1:7".parse().unwrap());
        // No host has an address in this network: it is reserved for documentation.
        let error = bind("203.0.113.0/24:7000").address("quic").unwrap_err();
        assert!(error.to_string().contains("`quic`: 203.0.113.0/24:7000"), "{error}");
    }

    #[test]
    fn a_network_holds_the_addresses_that_begin_as_it_does() {
        let holds = |network: &str, address: &str| match bind(network) {
            Bind::Network(network, _) => network.contains(address.parse().unwrap()),
            Bind::Address(_) => false,
        };
        assert!(holds("192.168.100.0/24:1", "192.168.100.255") && holds("0.0.0.0/0:1", "8.8.8.8"));
        assert!(
            !holds("192.168.100.0/24:1", "192.168.101.1") && !holds("192.168.100.1/32:1", "192.168.100.2")
        );
        assert!(holds("fd00::/64:1", "fd00::1:2") && !holds("fd00::/64:1", "fd00:0:0:1::1"));
        assert!(!holds("0.0.0.0/0:1", "::1"));
    }
}
