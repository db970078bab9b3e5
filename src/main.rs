fn main() {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some("loader") {
        match warpfs::loader::child::Arguments::parse(words) {
            Ok(arguments) => std::process::exit(warpfs::loader::child::run(&arguments)),
            Err(failure) => {
                eprintln!("warpfs: {failure}");
                std::process::exit(2);
            }
        }
    }
}
